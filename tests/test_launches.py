"""Compiled code noted launch by launch: the same results without the rest of the code."""

from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch

from minikv import CompressedKVCache, generate
from minikv.launches import Recorder
from minikv.step import CompiledStep, step


def allocating(args):
    """As inductor writes it: x, y -> x * 2 + y."""
    x, y = args
    args.clear()
    buf0 = empty_strided_cpu((3,), (1,), torch.float32)  # noqa: F821
    cpp_fused_double(x, buf0)  # noqa: F821
    buf1 = empty_strided_cpu((3,), (1,), torch.float32)  # noqa: F821
    cpp_fused_sum(buf0, y, buf1)  # noqa: F821
    del x, y, buf0
    return (buf1,)


def writing(args):
    """x += 2 x, nothing is given back."""
    (x,) = args
    args.clear()
    buf0 = empty_strided_cpu((3,), (1,), torch.float32)  # noqa: F821
    cpp_fused_double(x, buf0)  # noqa: F821
    cpp_fused_sum(buf0, x, x)  # noqa: F821
    return ()


def multiplying(args):
    """x, y -> x @ y * 2."""
    x, y = args
    args.clear()
    buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)  # noqa: F821
    extern_kernels.mm(x, y, out=buf0)  # noqa: F821
    buf1 = empty_strided_cpu((2, 2), (2, 1), torch.float32)  # noqa: F821
    cpp_fused_double(buf0, buf1)  # noqa: F821
    return (buf1,)


def calling_others(args):
    (x,) = args
    args.clear()
    return (torch.relu(x),)


class Module:
    """Globals such as those of inductor's code, counting what is called."""

    def __init__(self):
        self.called = []
        self.names = dict(
            torch=torch,
            empty_strided_cpu=self.counted(
                "allocate", lambda *how: torch.empty_strided(*how[:2], dtype=how[2])
            ),
            extern_kernels=SimpleNamespace(mm=self.counted("mm", torch.mm)),
            cpp_fused_double=self.counted("double", lambda x, out: torch.mul(x, 2, out=out)),
            cpp_fused_sum=self.counted("sum", lambda x, y, out: torch.add(x, y, out=out)),
        )

    def counted(self, name, function):
        def call(*args, **named):
            self.called.append(name)
            return function(*args, **named)

        return call

    def code(self, function) -> FunctionType:
        return FunctionType(function.__code__, self.names)


def again(recorder: Recorder) -> None:
    for launch in recorder.launches:
        launch()


def test_kernels_run_again_on_the_tensors_they_were_given_and_nothing_is_allocated():
    module, recorder = Module(), Recorder()
    x, y = torch.ones(3), torch.ones(3)
    (out,) = recorder.run(module.code(allocating), [x, y])
    assert out.tolist() == [3, 3, 3]
    module.called.clear()
    x.fill_(5)
    again(recorder)
    assert out.tolist() == [11, 11, 11]
    assert module.called == ["double", "sum"]


def test_the_same_code_run_for_other_tensors_shares_its_buffers_but_not_its_outputs():
    module, recorder = Module(), Recorder()
    code, x, y = module.code(writing), torch.ones(3), torch.full((3,), 2.0)
    for tensor in (x, y):
        assert recorder.run(code, [tensor]) == ()
    assert module.called.count("allocate") == 1
    again(recorder)
    assert (x.tolist(), y.tolist()) == ([9] * 3, [18] * 3)
    code, outs = module.code(allocating), []
    for tensor in (x, y):
        outs += recorder.run(code, [tensor, tensor])
    assert [out.tolist() for out in outs] == [[27] * 3, [54] * 3]


def test_products_of_the_library_are_launches_too():
    module, recorder = Module(), Recorder()
    x, y = torch.eye(2), torch.ones(2, 2)
    (out,) = recorder.run(module.code(multiplying), [x, y])
    x.fill_(1)
    again(recorder)
    assert out.tolist() == [[4, 4], [4, 4]]
    assert module.called[-2:] == ["mm", "double"]


def test_code_that_does_something_else_too_runs_as_a_whole():
    recorder, x = Recorder(), torch.ones(3)
    (out,) = recorder.run(calling_others, [x])
    x.fill_(7)
    again(recorder)
    assert out.tolist() == [7, 7, 7]


def test_the_names_in_a_module_are_its_own_again_after_a_failure():
    module = Module()
    module.names["cpp_fused_sum"] = None  # cannot be called
    own = dict(module.names)
    with pytest.raises(TypeError):
        Recorder().run(module.code(allocating), [torch.ones(3), torch.ones(3)])
    assert module.names == own


def test_a_compiled_step_of_a_model_is_nothing_but_kernels(toy):
    """One for each block and one at either end."""

    def answer(steps: list) -> list[int]:
        cache = CompressedKVCache.for_model(toy, "snapkv", budget=40, room=4)
        steps.append(CompiledStep(cache) if steps else step)
        return generate(toy, [9] * 50, cache, max_new_tokens=9, ignore_eos=True, step=steps[-1]).ids

    steps: list = []
    assert answer(steps) == answer(steps)
    launches = steps[1].recorder.launches
    assert len(launches) == 2 + len(toy.layers)
    assert all(isinstance(launch, partial) for launch in launches)
