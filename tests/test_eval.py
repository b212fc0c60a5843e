"""scripts/eval.py on a toy: its samples, its rows, continuing a run, and one look at the real model."""

import json
import random
import re
import shutil

import pytest
import torch

from minikv import Policy
from minikv.generate import prefill
from minikv.sizing import predict_nbytes
from minikv.step import step
from models import load_model, load_tokenizer
from scripts import eval as script
from scripts.evaluation import files, measure, natural, retrieval
from scripts.evaluation.caches import FULL, CacheMaker, Plan, Settings, all_plans
from scripts.evaluation.measure import read_prompt
from scripts.evaluation.samples import Order
from scripts.evaluation.tasks import TASKS, find_task

ASKING = [name for name, task in TASKS.items() if task.asks]
SMALL = ["--tokens", "300", "--room", "16", "--n", "2"]


@pytest.fixture(scope="module")
def folder(toy_dir, tmp_path_factory):
    """The toy with a longer context: its tokenizer spells most words letter by letter."""
    directory = tmp_path_factory.mktemp("long") / "toy"
    shutil.copytree(toy_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return directory


@pytest.fixture(scope="module")
def tok(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Run the script: exit code, rows, standard output, standard error."""

    def run(*flags: object, out: str | None = "rows.jsonl"):
        where = ["--out", str(tmp_path / out)] if out else []
        try:
            code = script.main(["--model", str(folder), *where, *map(str, flags)])
        except SystemExit as stop:  # argparse
            code = stop.code
        said = capsys.readouterr()
        path = tmp_path / (out or "none")
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return code, rows, said.out, said.err

    return run


# Samples.


@pytest.mark.parametrize("name", ASKING)
def test_the_answer_is_in_the_context_and_the_question_is_not(name, tok):
    for sample in TASKS[name].make(tok, Order(n=5, seed=1, tokens=600, new=0)):
        context, target = tok.decode(sample.context), sample.target
        scored = tok.decode([id for id, counts in zip(target.ids, target.scored, strict=True) if counts])
        parts = re.findall("[A-Z]{5}", tok.decode(target.ids)) if name == "variables" else [scored]
        assert "".join(parts) == scored and len(scored) >= 5
        assert all(part in context for part in parts)
        question = tok.decode(sample.question)
        assert scored not in question and (name == "induction" or "?" in question or "Find" in question)
        assert 400 < len(sample.context) < 700
        assert not target.scored[0] or name == "induction"
        assert sample.depth is None or 0 <= sample.depth <= 1


def test_a_fact_asked_for_stands_at_its_depth(tok):
    for sample in TASKS["passkey"].make(tok, Order(5, 0, 900, 0)):
        text = tok.decode(sample.context)
        place = text.index("pass key") / len(text)
        assert place == pytest.approx(sample.depth, abs=0.12)


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_the_seed_only_and_fewer_are_the_first_of_more(name, tok):
    make, new = TASKS[name].make, 16 if TASKS[name].new else 0
    four = make(tok, Order(4, 7, 400, new))
    assert make(tok, Order(2, 7, 400, new)) == four[:2]
    assert make(tok, Order(4, 8, 400, new))[0] != four[0]


def test_natural_text_is_cut_into_stretches_that_do_not_overlap(tok, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, range(10_000, 10_100))))
    whole = tok.encode(path.read_text())
    samples = natural.continuation(tok, Order(4, 0, 90, 30, path))
    stretches = {tuple(s.context + s.target.ids) for s in samples}
    assert stretches == {tuple(whole[i : i + 120]) for i in range(0, len(whole) - 119, 120)}
    assert {len(s.target.ids) for s in samples} == {30}
    with pytest.raises(ValueError, match="not for --n 50"):
        natural.continuation(tok, Order(50, 0, 90, 30, path))


@pytest.mark.parametrize("build", [retrieval.fact, retrieval.line, retrieval.table])
def test_too_few_tokens_are_refused_with_the_number(build, tok):
    with pytest.raises(ValueError, match="5 tokens"):
        build(tok, random.Random(0), 0, 5)


def test_more_lines_than_there_are_names_are_refused(tok):
    with pytest.raises(ValueError, match="too many for 336"):
        retrieval.line(tok, random.Random(0), 0, 100_000)


def test_the_protocols_differ_in_where_the_question_is_read(tok):
    (sample,) = TASKS["facts"].make(tok, Order(1, 0, 400, 0))
    (together,), (context, question) = sample.prompt("aware"), sample.prompt("agnostic")
    assert together == context + question
    text = tok.decode(question)
    assert "What is the secret code" in text and "What is" not in tok.decode(context)


# Files.


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(x) + "\n" for x in objects))
    return path


def test_longbench_lines_become_samples_with_their_own_metric(tok, tmp_path):
    base = dict(context="word " * 300, all_classes=None)
    path = write_lines(
        tmp_path / "a.jsonl",
        {**base, "input": "Who?", "answers": ["Ann", "the Bob"], "dataset": "hotpotqa"},
        {
            **base,
            "input": "Type?",
            "answers": ["city"],
            "dataset": "trec_e",
            "all_classes": ["city", "state"],
        },
        {**base, "input": "", "answers": ["a b"], "dataset": "gov_report"},
    )
    qa, trec, report = files.longbench(path)(tok, Order(9, 0, 900, 0))
    assert qa.target.judge("bob") == 1 and qa.target.judge("ann bob") == pytest.approx(2 / 3)
    assert trec.target.judge("\ncity\nstate") == 1 and trec.target.judge("city state") == 0.5
    assert "summary" in tok.decode(report.question) and report.target.judge("a c") == 0.5
    assert all(sample.n_tokens <= 900 for sample in (qa, trec, report))
    assert len(report.context) == 900 - 512 - len(report.question)  # the middle is cut out
    assert len(files.longbench(path)(tok, Order(1, 0, 900, 0))) == 1


def test_ruler_lines_ask_in_their_last_line(tok, tmp_path):
    raw = dict(
        input="Some text.\nmore\nWhat are the numbers?", outputs=["11", "22"], answer_prefix=" They are"
    )
    (sample,) = files.ruler(write_lines(tmp_path / "niah.jsonl", raw))(tok, Order(9, 0, 900, 0))
    assert "more" in tok.decode(sample.context) and "What" not in tok.decode(sample.context)
    assert tok.decode(sample.question).endswith("They are")
    assert sample.target.judge("22 and 33") == 0.5
    (any_of,) = files.ruler(write_lines(tmp_path / "qa_1.jsonl", raw))(tok, Order(9, 0, 900, 0))
    assert any_of.target.judge("22 and 33") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("{}\n", "line 1 has no context"),
        ("[1]\n", "line 1 has no"),
        ("nonsense\n", "line 1 is no JSON"),
    ],
)
def test_a_broken_file_is_refused_by_line(text, words, tok, tmp_path):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        files.longbench(tmp_path / "bad.jsonl")(tok, Order(9, 0, 900, 0))
    raw = dict(context="", input="", answers=[], dataset="dureader")
    with pytest.raises(ValueError, match="dureader"):
        files.longbench(write_lines(tmp_path / "zh.jsonl", raw))(tok, Order(9, 0, 900, 0))


# Caches.


def test_plans_are_all_combinations_once_and_the_full_cache_comes_first():
    plans = all_plans(["snapkv", "int4", "full", "snapkv"], ["64", "25%"], ["1MiB"])
    assert plans[0] == FULL
    assert set(plans) == {
        FULL, Plan("snapkv", "64"), Plan("snapkv", "25%"), Plan("snapkv", None, "1MiB"), Plan("int4"),
        Plan("int4", None, "1MiB"),
    }  # fmt: skip
    assert len(plans) == 6


@pytest.mark.parametrize("policy", ["snapkv(window=8)", "h2o", "snapkv(window=8)+int4", "mikv"])
def test_bytes_are_given_in_numbers_shares_or_as_another_policy_takes(policy, model, tok):
    maker = CacheMaker(model, tok, Settings(room=16, recent=8))
    full = maker.make(FULL, 600).nbytes
    limits = {"50%": full / 2, "int8": maker.make(Plan("int8"), 600).nbytes, f"{full // 3}": full / 3}
    for text, limit in limits.items():
        cache = maker.make(Plan(policy, None, text), 600)
        assert cache.nbytes <= limit
        assert cache.nbytes > 0.96 * limit or cache.budgets == [640, 640]


def test_what_a_store_cannot_hold_in_so_many_bytes_is_refused(model, tok):
    maker = CacheMaker(model, tok, Settings(room=16))
    with pytest.raises(ValueError, match="int8 holds .* of 640 tokens"):
        maker.make(Plan("int8", None, "10%"), 600)


def test_a_share_is_of_the_samples_tokens_and_stores_hold_all(model, tok):
    maker = CacheMaker(model, tok, Settings(room=16, every=0, sinks=2, recent=8))
    policy = Policy.parse("snapkv(window=8)")
    cache = maker.make(Plan("snapkv(window=8)", "25%"), 600)
    assert cache.budgets == [160, 160]
    assert (cache.policy.every, cache.policy.sinks, cache.policy.recent) == (0, 2, 8)
    assert cache.nbytes == predict_nbytes(model, policy, 160, room=16)
    assert maker.make(Plan("int4"), 600).budgets == [640, 640]


@pytest.mark.parametrize(
    "policy", ["full", "snapkv", "adakv", "pyramidkv", "h2o", "mikv", "kivi2", "hashevict", "kvzip"]
)
def test_reading_together_is_reading_alone(policy, model, tok):
    """One forward serves all caches whose first chunk attends in full; the others read by themselves."""
    (sample,) = TASKS["passkey"].make(tok, Order(1, 0, 150, 0))
    maker = CacheMaker(model, tok, Settings(room=16))
    plans = [FULL, Plan("random", "64"), *all_plans([policy], ["64"], [])[-1:]]
    for protocol in ("aware", "agnostic"):
        chunks = sample.prompt(protocol)
        caches = [maker.make(plan, sample.n_tokens) for plan in plans]
        end = read_prompt(model, caches, chunks)[-1]
        alone = maker.make(plans[-1], sample.n_tokens)
        with torch.no_grad():
            for chunk in chunks:
                expected = prefill(model, [chunk], alone)
        assert [caches[-1].kept(i) for i in range(2)] == [alone.kept(i) for i in range(2)]
        torch.testing.assert_close(end, expected, atol=1e-4, rtol=1e-4)


def test_a_first_chunk_of_one_token_is_a_step_for_every_cache(model, tok):
    maker = CacheMaker(model, tok, Settings(room=16))
    plans, chunks = [FULL, Plan("snapkv", "64")], [[3], [4, 5, 6]]
    caches = [maker.make(plan, 40) for plan in plans]
    together, alone = read_prompt(model, caches, chunks), maker.make(plans[1], 40)
    with torch.no_grad():
        for chunk in chunks:
            expected = prefill(model, [chunk], alone)
    for end in together:
        torch.testing.assert_close(end, expected, atol=1e-4, rtol=1e-4)
    assert caches[1].kept(0) == alone.kept(0)


# Runs.


@pytest.fixture
def eager(monkeypatch):
    """Compiled steps as eager ones: compiling is tested elsewhere and takes its time."""
    monkeypatch.setattr(measure, "CompiledStep", lambda cache, note: step)


def test_every_task_runs_from_the_command_line_to_a_table(run, eager):
    code, rows, out, err = run(
        "--policy", "random", "int4", "--budget", "64", "--task", *TASKS, *SMALL, "--new", "12",
        "--protocol", "aware", "agnostic", "--n", "1",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert len(rows) == (len(ASKING) * 2 + 4) * 3
    for row in rows:
        assert set(TASKS[row["task"]].columns) - {"better_heads"} <= set(row["metrics"])
        assert row["nbytes"] > 0 and row["kept"] == pytest.approx(
            64 if row["budget"] else row["prompt_tokens"]
        )
        if row["policy"] == "full" and "kl" in row["metrics"]:
            assert (row["metrics"]["kl"], row["metrics"]["agreement"]) == (0, 1)
    assert out.count("question-agnostic") == len(ASKING) and out.count("no question") == 4
    assert {row["protocol"] for row in rows} == {"aware", "agnostic", "none"}
    together = out.partition("together")[2].splitlines()
    assert [line.split("|")[1].strip() for line in together[4:]] == ["full", "random", "int4"]
    assert all(f" {task}: " in together[2] for task in TASKS)


def test_the_full_cache_predicts_what_the_model_without_a_cache_does(run, model, tok):
    _, rows, _, _ = run("--policy", "random", "--task", "text", "long", "facts", *SMALL, "--new", "12")
    for row in rows:
        task = TASKS[row["task"]]
        sample = task.make(tok, Order(2, 0, 300, row["new"]))[row["sample"]]
        prompt, target = sample.context + sample.question, sample.target
        with torch.no_grad():
            logits = model(torch.tensor([prompt + target.ids[:-1]]))[0, len(prompt) - 1 :]
        nll = -logits.log_softmax(-1)[torch.arange(len(logits)), target.ids]
        expected = float(nll[torch.tensor(target.scored)].mean())
        if row["policy"] == "full":
            assert row["metrics"]["nll"] == pytest.approx(expected, abs=1e-4)
        else:
            assert row["metrics"]["kl"] > 0


def test_the_same_seed_gives_the_same_rows_and_another_one_others(run):
    flags = ["--policy", "random", "h2o", "--budget", "64", "--task", "text", "facts", *SMALL, "--new", "12"]
    first, again, other = (
        run(*flags, "--seed", seed, out=name)[1] for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert first == again
    assert [row["metrics"] for row in first] != [row["metrics"] for row in other]


def test_a_run_is_continued_and_nothing_is_measured_twice(run, tmp_path, monkeypatch):
    flags = ["--policy", "random", "--task", "facts", "--budget", "64", *SMALL]
    _, rows, table, _ = run(*flags)
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text()[:-40])  # as if the run had been killed while writing
    read = []
    monkeypatch.setattr(script, "read_prompt", lambda *args: read.append(1) or read_prompt(*args))
    assert run(*flags)[1:3] == (rows, table)
    assert len(read) == 1  # the sample that had lost a row
    assert run(*flags)[1:3] == (rows, table)
    assert len(read) == 1
    _, more, _, _ = run(*flags, "--n", "3", "--policy", "random", "streaming")
    assert more[: len(rows)] == rows and len(more) == 3 * 3


def test_without_a_file_rows_go_to_standard_output(run):
    _, _, out, _ = run("--policy", "random", "--task", "facts", "--budget", "64", *SMALL, out=None)
    rows = [json.loads(line) for line in out.splitlines()[:4]]
    assert [row["policy"] for row in rows] == ["full", "random"] * 2
    assert out.splitlines()[4].startswith("facts: 300 tokens, question-aware")


def test_local_files_are_answered_freely_and_judged(run, tmp_path):
    raw = dict(input="The number is 11.\nWhich number?", outputs=["11"])
    path = write_lines(tmp_path / "niah.jsonl", raw)
    code, rows, out, _ = run("--policy", "random", "--task", f"ruler:{path}", "--budget", "64", "--room", 16)
    assert code == 0 and "score" in out
    for row in rows:
        assert row["metrics"]["score"] == float("11" in row["metrics"]["said"])


def test_what_cannot_work_is_left_out_and_named_once(run):
    flags = ["--task", "facts", "--budget", "5", *SMALL]
    code, rows, _, err = run("--policy", "int8", "random", "--kv-bytes", "30%", *flags)
    assert code == 0
    assert {(row["policy"], row["kv_bytes"]) for row in rows} == {
        ("full", None),
        ("int8", None),
        ("random", "30%"),
    }
    by_bytes, by_tokens = err.splitlines()
    assert "left out of facts, int8" in by_bytes and "bytes" in by_bytes
    assert "left out of facts, random" in by_tokens and "budget of 5 tokens" in by_tokens
    assert run("--policy", "random", *flags, out="nothing")[0] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "snapvk"], ["snapvk", "snapkv"]),
        (["--task", "fcats"], ["fcats", "facts"]),
        (["--task", "longbench:nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--budget", "many"], ["many", "25%"]),
        (["--budget", "120%"], ["120%"]),
        (["--kv-bytes", "in4"], ["in4", "int4"]),
        (["--kv-bytes", "snapkv"], ["snapkv", "store"]),
        (["--n", "0"], ["--n", "1"]),
        (["--tokens", "5000"], ["1024", "--tokens"]),
        (["--text", "nowhere.txt", "--task", "text"], ["nowhere.txt"]),
        (["--protocol", "both"], ["both", "agnostic"]),
    ],
)
def test_mistakes_cost_one_line_and_exit_code_2(flags, words, run):
    code, rows, out, err = run(*flags)
    assert (code, rows, out) == (2, [], "")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_a_file_of_something_else_is_not_written_to(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    code, rows, _, err = run("--task", "facts", *SMALL)
    assert code == 2 and "line 1 is no row" in err and rows == [{"a": 1}]


def test_quick_changes_the_defaults_only():
    args = script.parse_args(["--quick", "--n", "7", "--task", "lines"])
    assert (args.n, args.task, args.policy, args.tokens) == (7, ["lines"], script.QUICK["policy"], [512])


def test_pictures_are_written(run, tmp_path):
    pictures = tmp_path / "new" / "pictures"
    code, _, _, err = run(
        "--policy", "random", "int4", "--budget", "64", "128", "--task", "facts", "--tokens", "200", "300", "--n", "2",
        "--room", "16", "--plot", pictures,
    )  # fmt: skip
    assert code == 0
    drawn = sorted(path.name for path in pictures.iterdir())
    each = [f"facts-aware-{n}-{kind}.png" for n in (200, 300) for kind in ("bytes", "kept", "tokens")]
    assert drawn == sorted([*each, "facts-aware-needles.png"])
    for name in drawn:
        picture = (pictures / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000
        assert name in err


def test_differences_are_those_of_the_same_samples(run):
    flags = ["--policy", "random", "l2", "--budget", "64", "--task", "facts", *SMALL]
    _, rows, out, _ = run(*flags, "--against", "random")
    told = out.partition("minus random")[2].splitlines()[-1]
    accuracy = {
        p: [row["metrics"]["accuracy"] for row in rows if row["policy"] == p] for p in ("l2", "random")
    }
    pairs = [mine - other for mine, other in zip(accuracy["l2"], accuracy["random"], strict=True)]
    assert told.split("|")[1].strip() == "l2" and f"{sum(pairs) / 2:+.3f} (" in told
    code, _, _, err = run(*flags, "--against", "snapkv")
    assert code == 2 and "not among the policies" in err


def test_the_cost_of_a_policy_becomes_a_picture_of_quality_against_time(run, tmp_path, eager):
    flags = ["--policy", "random", "int4", "--budget", "64", "--task", "text", "cost", *SMALL, "--new", "12"]
    _, rows, _, _ = run(*flags, "--plot", tmp_path / "pictures")
    assert sum(row["task"] == "cost" for row in rows) == 3  # one sample, however many are asked for
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert "text-300-time.png" in drawn and not any(name.startswith("cost") for name in drawn)


@pytest.mark.slow
def test_the_real_model_finds_facts_and_half_kept_at_random_does_not(real_model, real_tok):
    task, nll = find_task("facts"), []
    maker = CacheMaker(real_model, real_tok, Settings(room=64))
    for sample in task.make(real_tok, Order(2, 0, 500, 0)):
        caches = [maker.make(plan, sample.n_tokens) for plan in (FULL, Plan("random", "50%"))]
        ends = read_prompt(real_model, caches, sample.prompt("aware"))
        nll.append([m["nll"] for m in task.measure(real_model, real_tok, sample, caches, ends)])
    full, half = (sum(side) / len(side) for side in zip(*nll, strict=True))
    assert full < 0.6 and half > full + 0.4
