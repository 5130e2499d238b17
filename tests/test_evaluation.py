"""Evaluation: grades by hand, 50 stored answers, and what `validate` and `test` really sample from."""

import json
import sys
from pathlib import Path

import pytest
import torch
from lightning import Trainer

from qerl_pl.callbacks import EvaluationResults
from qerl_pl.checkpoint import prepare
from qerl_pl.datamodule import RolloutDataModule
from qerl_pl.engine import TransformersEngine
from qerl_pl.engine.base import EngineSpec
from qerl_pl.evaluation import Grades, Identified, ks, pass_rate, report, summarize, vote
from qerl_pl.evaluation_plot import bars, draw
from qerl_pl.evaluation_table import table
from qerl_pl.lightning_cli import QeRLCLI
from qerl_pl.module import QeRLModule
from qerl_pl.peft_folder import adapter_settings
from qerl_pl.policy import Policy
from qerl_pl.rollouts import collate
from qerl_pl.types import Completion, Prompt
from registry.prompts import Arithmetic, File
from registry.quantization import NVFP4
from registry.rewards import GSM8K, ThinkAnswer

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
KNOWN = Path(__file__).parent / "data" / "known_answers.jsonl"
SETTINGS = {"policy": "p", "model": "m", "quantization": "q", "temperature": 0.6, "top_p": 0.95, "max_tokens": 9,
            "samples": 2, "correctness": "gsm8k"}  # fmt: skip


def batch(answers: list[list[str]], golds: list[str], source: str = "", **columns: list):
    """Answers of each problem, graded as a run does it."""
    prompts, completions = [], []
    for i, (texts, gold) in enumerate(zip(answers, golds, strict=True)):
        prompt = Prompt([1], "", {"answer": gold, "problem_id": f"{source}{i}"} | {k: v[i] for k, v in columns.items()})
        for text in texts:
            prompts.append(prompt)
            completions.append(Completion([1, 2], [0.0, 0.0], f"<answer>{text}</answer>", text != "cut"))
    made = collate(prompts, completions)
    made.groups = torch.arange(len(golds)).repeat_interleave(len(answers[0]))
    extracted = [ThinkAnswer().extract(c.text) for c in completions]
    scores = GSM8K()([], [], answer=[p.columns["answer"] for p in prompts], extracted=extracted)
    made.reward_parts = {"gsm8k": torch.tensor([float("nan") if s is None else s for s in scores])}
    made.source = source
    return made


def graded(*batches) -> Grades:
    grades = Grades()
    for one in batches:
        grades.add(one, "gsm8k", ThinkAnswer())
    return grades


def test_grades_by_hand():
    levels = ["Level 2", "Level 10", "Level 2"]
    one = batch([["1", "1.0", "2"], ["cut", "5", "6"], ["7", "7", "7"]], ["1", "5", "no number"], level=levels)
    summary = summarize(graded(one).sets[""])
    assert (summary["problems"], summary["samples"], summary["ungraded"]) == (3, 3, 1)
    assert [row["right"] for row in summary["rows"]] == [2, 1, 0]
    assert [row["level"] for row in summary["rows"]] == levels
    assert summary["pass@1"]["value"] == pytest.approx((2 / 3 + 1 / 3) / 3)
    # 1 − C(n−c, 2)/C(3, 2): 1, 2/3, 0
    assert {k: e["value"] for k, e in summary["pass@k"].items()} == pytest.approx({"1": 1 / 3, "2": 5 / 9, "3": 2 / 3})
    # Of three answers: 1 wins; no vote is most frequent: "cut" is an answer, so 5, 6 and cut tie.
    assert summary["majority@k"]["3"]["value"] == pytest.approx((1 + 1 / 3) / 3)
    assert summary["clipped_ratio"] == pytest.approx(1 / 9)
    assert list(summary["level"]) == ["Level 2", "Level 10"]
    assert summary["level"]["Level 2"]["pass@1"]["value"] == pytest.approx(1 / 3)
    assert summary["level"]["Level 10"]["problems"] == 1


def test_subject_is_read_from_type_too():
    one = batch([["1"], ["2"], ["3"]], ["1", "1", "3"], type=["algebra", "geometry", None])
    summary = summarize(graded(one).sets[""])
    assert {k: v["pass@1"]["value"] for k, v in summary["subject"].items()} == {"algebra": 1, "geometry": 0}
    assert "level" not in summary


def test_metrics_of_one_set_and_of_several():
    first = batch([["1", "2"], ["1", "1"]], ["1", "1"], "a")
    second = batch([["3", "3"]], ["4"], "b")
    found = graded(first, second).metrics("test")
    assert (found["test/a/pass@1"], found["test/b/pass@1"], found["test/pass@1"]) == (0.75, 0, 0.375)
    assert (found["test/a/pass@2"], found["test/a/majority@2"]) == (1, 0.75)  # 1 and 2 tie
    alone = graded(batch([["1"], ["2"]], ["1", "1"])).metrics("validation")
    assert alone.keys() == {"validation/pass@1", "validation/pass@1_low", "validation/pass@1_high"}
    assert alone["validation/pass@1"] == 0.5


def test_votes():
    assert vote("1/2") == vote("0.5") == vote(" .50") != vote("0.05")
    assert vote("x + 1") == vote("x+1") != vote("x + 2")
    assert vote("8") == vote("8 dollars") == vote("$8.00") != vote("-8")
    assert vote(r"\frac{3}{4}") == vote("0.75") != vote("3")
    assert vote(None) is None


def test_numbers_of_samples():
    assert [ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_problems_are_known_by_what_they_are():
    class Rows(Arithmetic):
        def __getitem__(self, index):
            return [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1}, {"prompt": "a", "answer": 1},
                    {"prompt": "a", "answer": 2, "level": 3}][index]  # fmt: skip

    rows = list(Identified(Rows(size=4)))
    ids = [row["problem_id"] for row in rows]
    assert ids[2] == f"{ids[0]}#2" and len({id_.partition("#")[0] for id_ in ids}) == 3
    assert rows[3] == {"prompt": "a", "answer": 2, "level": 3, "problem_id": ids[3]}
    assert Identified(Rows(size=4))[1] == rows[1] and len(Identified(Rows(size=4))) == 4
    assert Identified(Rows(size=4)).size == 4

    class Chat(Arithmetic):
        def __getitem__(self, index):
            return {"prompt": [{"role": "user", "content": "b"}], "answer": 1}

    assert Identified(Chat(size=1))[0]["problem_id"] == ids[1]


def test_report_with_the_base_beside():
    policy = graded(batch([["1", "1"], ["2", "1"], ["3", "3"]], ["1", "1", "1"], "a"))
    base = graded(batch([["2", "1"], ["2", "1"], ["1", "3"]], ["1", "1", "1"], "a"))
    result = report("test", SETTINGS, policy, base)
    assert result == json.loads(json.dumps(result))
    assert result["pass@1"]["value"] == result["base"]["pass@1"]["value"] == 0.5
    assert result["sets"]["a"]["difference"]["value"] == 0  # +1/2, 0, −1/2
    assert result["sets"]["a"]["base"]["rows"][2] == {"id": "a2", "right": 1}
    said = table(result)
    assert "50.0 %" in said and "+0.0 (-" in said and "T 0.6, top-p 0.95" in said


def test_plot(tmp_path, monkeypatch):
    levels = {"level": ["1", "2"]}
    policy = graded(batch([["1", "1"], ["2", "1"]], ["1", "1"], "a", **levels), batch([["1", "1"]], ["2"], "b"))
    base = graded(batch([["2", "1"], ["2", "1"]], ["1", "1"], "a", **levels), batch([["1", "1"]], ["2"], "b"))
    result = report("test", SETTINGS, policy, base)
    panels = bars(result)
    assert {k: list(v) for k, v in panels.items()} == {
        "pass@1, %": ["a", "b", "mean"],
        "a by level: pass@1, %": ["1", "2"],
    }
    heights = {group: {n: e["value"] for n, e in pair.items()} for group, pair in panels["pass@1, %"].items()}
    assert heights == {"a": {"base": 0.5, "policy": 0.75}, "b": {"base": 0, "policy": 0},
                       "mean": {"base": 0.25, "policy": 0.375}}  # fmt: skip
    draw(result, tmp_path / "test.png")
    assert (tmp_path / "test.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'qerl-pl\[plot\]'"):
        draw(result, tmp_path / "other.png")


class Stored(TransformersEngine):
    """Gives stored completions to the prompts of the file."""

    def generate(self, prompts, sampling, seeds, progress=None):
        rows = [json.loads(line) for line in KNOWN.read_text().splitlines()]
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        asked = [next(row for row in rows if row["prompt"] in text) for text in texts]
        return [[Completion([1], [0.0], row["completion"], True)] * sampling.n for row in asked]


def test_fifty_answers_graded_by_hand(tmp_path):
    """The verdicts in the file were decided by people who read problem, gold answer and completion."""
    rows = [json.loads(line) for line in KNOWN.read_text().splitlines()]
    assert len(rows) == 50
    data = RolloutDataModule(test=File(str(KNOWN)), engine=Stored(), rewards=[GSM8K()], eval_batch=7)
    trainer = Trainer(devices=1, logger=False, default_root_dir=tmp_path, callbacks=[EvaluationResults()],
                      enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)  # fmt: skip
    data.engine.tokenizer = None
    (logged,) = trainer.test(QeRLModule(), data, verbose=False)
    assert logged["test/pass@1"] == pytest.approx(25 / 50)
    result = json.loads((tmp_path / "results" / "test.json").read_text())
    verdicts = [row["right"] for row in result["sets"]["test"]["rows"]]
    wrong = [row["kind"] for row, verdict in zip(rows, verdicts, strict=True) if verdict != row["right"]]
    assert wrong == []
    assert result["pass@1"]["value"] == 0.5 == sum(row["right"] for row in rows) / 50


# ---- whole runs ------------------------------------------------------------------------------------------------------

SMALL = [
    "--config", str(CONFIG), "--data.test.size", "12", "--data.validation.size", "12",
    "--trainer.enable_progress_bar", "false", "--data.max_completion_length", "24",
]  # fmt: skip


def command(folder: Path, name: str, *args: str) -> QeRLCLI:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["qerl-pl", name, *SMALL, "--trainer.logger.save_dir", str(folder), *args])
        return QeRLCLI()


def written(folder: Path, name: str = "completions-test.jsonl") -> list[str]:
    (path,) = folder.rglob(name)
    return [json.loads(line)["completion"] for line in path.read_text().splitlines()]


def result(folder: Path, name: str = "test.json") -> dict:
    (path,) = folder.rglob(f"results/{name}")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A random adapter of another rank, scale and reach than those of the config."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    policy = Policy(EngineSpec(prepare("tiny", NVFP4()), NVFP4(), 4, 8.0, ("q_proj", "v_proj"), "float32"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.adapter_parameters().items():
        if "lora_B" in name:
            parameter.data = 0.6 * torch.randn(parameter.shape, generator=generator)
    policy.save_adapter(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    command(folder, "test", "--adapter", "none")
    return folder


def test_an_adapter_folder_is_what_is_sampled_from(adapter, base, tmp_path):
    cli = command(tmp_path, "test", "--adapter", str(adapter), "--evaluate_base", "true")
    assert (cli.model.lora.rank, cli.model.lora.alpha, sorted(cli.model.lora.targets)) == (4, 8.0, ["q_proj", "v_proj"])
    from safetensors.torch import load_file

    saved, held = load_file(adapter / "adapter_model.safetensors"), cli.datamodule.engine.adapter()
    assert saved.keys() == held.keys() and all(torch.equal(held[n], t) for n, t in saved.items())  # also after the base
    ours, theirs = written(tmp_path), written(base)
    assert len(ours) == len(theirs) == 24
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) > 12
    found, alone = result(tmp_path), result(base)
    assert found["settings"]["policy"] == f"adapter {adapter}" and alone["settings"]["policy"] == "base alone"
    beside = found["sets"]["test"]["base"]
    assert beside["rows"] == alone["sets"]["test"]["rows"]  # zero adapter, same seeds: the base itself
    changes = [a["right"] - b["right"] for a, b in zip(found["sets"]["test"]["rows"], beside["rows"], strict=True)]
    assert found["difference"]["value"] == pytest.approx(sum(changes) / 24)
    assert any(changes)
    assert list(tmp_path.rglob("results/test.png"))


def test_checkpoint_and_its_folder_are_the_same_policy_without_noise(tmp_path, base, monkeypatch):
    """Sampling is watched: noise while training, none in validation and test; the checkpoint's adapter in both."""
    clean = {
        n: w.clone()
        for n, w in Policy(EngineSpec(prepare("tiny", NVFP4()), NVFP4(), 4, 8.0, ("q_proj",))).norms().items()
    }
    seen: dict[bool, list[bool]] = {True: [], False: []}
    generate = TransformersEngine.generate

    def watched(self, prompts, sampling, seeds, progress=None):
        if sampling.max_tokens == 24:  # no proof
            seen[sampling.n == 4].append(all(torch.equal(w, clean[n]) for n, w in self.norms().items()))
        return generate(self, prompts, sampling, seeds, progress)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    strong = ("--model.noise", "constant", "--model.noise.sigma", "0.3", "--model.optimizer.lr", "3e-2")
    short = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "1", "--data.train.size", "64",
             "--data.prompts_per_batch", "4", "--data.num_generations", "4")  # fmt: skip
    fitted = command(tmp_path / "fit", "fit", *strong, *short)
    assert seen == {True: [False] * 3, False: [True] * 3}
    fitted.trainer.test(fitted.model, fitted.datamodule, verbose=False)  # in the process that had the noise
    assert seen[False] == [True] * 4
    (checkpoint,) = (tmp_path / "fit").rglob("last.ckpt")
    (folder,) = (tmp_path / "fit").rglob("adapter")
    command(tmp_path / "ckpt", "test", "--ckpt_path", str(checkpoint))
    command(tmp_path / "folder", "test", "--adapter", str(folder))
    command(tmp_path / "validate", "validate", "--ckpt_path", str(checkpoint))
    assert seen[False] == [True] * 7
    assert written(tmp_path / "ckpt") == written(tmp_path / "folder") == written(tmp_path / "fit") != written(base)
    assert result(tmp_path / "ckpt")["settings"]["policy"] == f"checkpoint {checkpoint}"
    assert result(tmp_path / "fit")["settings"]["policy"] == "after 3 rollout batches"
    last = written(tmp_path / "fit", "completions-validation.jsonl")[-24:]
    assert written(tmp_path / "validate", "completions-validation.jsonl") == last
    assert result(tmp_path / "validate", "validate.json")["split"] == "validation"


def test_several_sets(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    easy = "{class_path: arithmetic, init_args: {split: test, size: 6, levels: [1]}}"
    sets = f"{{easy: {easy}, all: arithmetic}}"
    arguments = ["--config", str(CONFIG), "--data.test", sets, "--data.validation", sets,
                 "--data.test.all.size", "5", "--data.eval_batch", "4", "--data.max_completion_length", "24",
                 "--trainer.enable_progress_bar", "false", "--trainer.logger.save_dir", str(tmp_path)]  # fmt: skip
    cli = QeRLCLI(args=arguments, run=False)
    assert {name: len(source) for name, source in cli.datamodule.sets("test").items()} == {"easy": 6, "all": 5}
    (logged,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    assert logged["test/pass@1"] == pytest.approx((logged["test/easy/pass@1"] + logged["test/all/pass@1"]) / 2)
    assert {"test/easy/pass@2", "test/all/majority@2", "test/easy/reward"} <= logged.keys()
    found = result(tmp_path)
    assert {name: summary["problems"] for name, summary in found["sets"].items()} == {"easy": 6, "all": 5}
    assert len(written(tmp_path)) == 22
    assert "| mean " in table(found)
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out and not list(tmp_path.rglob("*.png"))


def test_settings_of_the_paper_are_the_defaults():
    sampling = RolloutDataModule().eval_sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.95, 4096)
    assert RolloutDataModule(max_completion_length=8192).eval_sampling.max_tokens == 4096
    assert RolloutDataModule(max_completion_length=32).eval_sampling.max_tokens == 32
    assert RolloutDataModule(max_completion_length=32, eval_max_completion_length=16).eval_sampling.max_tokens == 16
    with pytest.raises(ValueError, match=r"eval_max_completion_length: 64 must be in 1..32 \(max_completion_length\)"):
        RolloutDataModule(max_completion_length=32, eval_max_completion_length=64)
    with pytest.raises(ValueError, match=r"data.test: 'a/b' cannot name a set"):
        RolloutDataModule(test={"a/b": Arithmetic()})
    with pytest.raises(ValueError, match=r"data.test: no prompts are configured"):
        RolloutDataModule(test=None).evaluation("test")


def test_mistakes(adapter, tmp_path):
    with pytest.raises(ValueError, match="give one of the two"):
        command(tmp_path, "test", "--adapter", "none", "--ckpt_path", "x.ckpt")
    with pytest.raises(ValueError, match="name a PEFT folder, such as adapter/ of a run, or none"):
        command(tmp_path, "test", "--adapter", str(tmp_path))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    with pytest.raises(ValueError, match="is LORA with use_rslora; only plain LoRA"):
        adapter_settings(tmp_path)
    with pytest.raises(ValueError, match="no problems"):
        pass_rate([])
