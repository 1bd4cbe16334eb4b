"""Output of the commands: JSON, tables, errors before plans, completion, and docs/command-line.md."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from controlplane.cli import _parser, main
from controlplane.commands.exit_status import MEANINGS, ExitStatus
from controlplane.commands.output import print_table
from controlplane.commands.reference_page import command_line_markdown, commands, described
from controlplane.config.limits_section import LimitsSection

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    file = tmp_path / "my.yaml"
    chat = f"{{model: {tmp_path}, engine: {{max_num_seqs: 8}}}}"
    file.write_text(
        f"models: {{chat: {chat}}}\npool: {{memory: 1GiB}}\n"
        "classes: {fast: {ttft_ms: 200, default: true}}\n",
        encoding="utf-8",
    )
    return file


def test_check_prints_its_facts_as_json(config, capsys):
    assert main(["check", str(config), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory_plan"]["memory_bytes"] == 2**30
    assert facts["memory_plan"]["kv_bytes_per_token"] == 2 * 2 * 64 * 2
    assert facts["classes"]["fast"]["objectives_ms"] == {"ttft": 200}
    assert {"name", "is_active", "reason"} == set(facts["mechanisms"][0])
    assert facts["engine_arguments"].startswith(("known", "not validated"))


def test_check_prints_every_limit_with_its_value(config, capsys):
    config.write_text(
        config.read_text(encoding="utf-8") + "server: {limits: {max_name: 99, max_body: 2MiB}}\n",
        encoding="utf-8",
    )
    assert main(["check", str(config)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    printed = dict(line.split(": ", 1) for line in lines if line.startswith("server.limits."))
    assert [key.removeprefix("server.limits.") for key in printed] == [
        one.name for one in fields(LimitsSection)
    ]
    assert printed["server.limits.max_name"] == "99"
    assert printed["server.limits.max_body"] == "2,097,152"
    # It follows from the models' context.
    assert printed["server.limits.max_values"].endswith(" (by default)")
    assert main(["check", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limits"] == [": ".join(one) for one in printed.items()]


def test_error_replaces_the_plan(config, capsys, monkeypatch):
    monkeypatch.setattr(
        "backends.vllm.argument_names.known_arguments", lambda: frozenset({"max_num_batched"})
    )
    monkeypatch.setattr("controlplane.commands.check.find_spec", lambda name: object())
    assert main(["check", str(config)]) == ExitStatus.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert "vLLM has no engine argument 'max_num_seqs'; did you mean max_num_batched" in err


@pytest.mark.long
@pytest.mark.parametrize("packaged", [None, "dev"])
def test_check_imports_neither_an_engine_nor_the_service(packaged, config):
    """Nor does it for bundled models that have not been built."""
    left_out = {
        "vllm", "torch", "transformers", "fastapi", "apscheduler", "prometheus_client", "predictors",
        "backends.embedding.client", "backends.vllm.client", "controlplane.service.gate",
    }  # fmt: skip
    script = (
        f"import sys; from controlplane.cli import main; main(['check', {packaged or str(config)!r}]);"
        f"sys.exit(', '.join({left_out} & set(sys.modules)) or 0)"
    )
    cache = config.with_name("cache")
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TANDEM_CACHE": str(cache)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "KV blocks" in done.stdout and not cache.exists()


def test_plain_table_is_aligned(capsys):
    print_table("things", ("name", "count"), [("a", 1), ("longer", "1,234")])
    assert capsys.readouterr().out == "things:\n  name    count\n  a           1\n  longer  1,234\n"


def test_table_on_a_terminal_is_coloured(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    print_table("mechanisms", ("mechanism", "state"), [("pacing", "on"), ("quotas", "off")])
    assert "\x1b[32mon" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "check" in script and "device" in script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pred", {"predictor"}),
        ("predictor e", {"eval"}),
        ("check --j", {"--json"}),
        ("apply c --gu", {"--guard"}),
        ("completion b", {"bash"}),
    ],
)
def test_bash_completes_words(words, offered, tmp_path, capsys):
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "tandem").write_text(capsys.readouterr().out, encoding="utf-8")
    lines = (
        "source ./tandem",
        'function=$(complete -p tandem | sed "s/.*-F \\([^ ]*\\) .*/\\1/")',
        f"COMP_WORDS=(tandem {words}) COMP_CWORD={len(words.split())}",
        f'$function tandem {words.split()[-1]} "" && printf "%s\\n" "${{COMPREPLY[@]}}"',
    )
    command = ["bash", "--norc", "-euc", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (set(done.stdout.split()), done.stderr, done.returncode) == (offered, "", 0)


def test_completion_without_shtab_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == ExitStatus.BAD_INPUT
    remedy = "it is in Tandem's extra 'cli'; in a clone: pip install '.[cli]'"
    assert capsys.readouterr().err == f"shtab is not installed; {remedy}\n"


def test_page_agrees_with_the_parser():
    page = Path("docs/command-line.md").read_text(encoding="utf-8")
    assert page == command_line_markdown(), "run `python -m controlplane.commands.reference_page`"
    for status in ExitStatus:
        assert f"| {int(status)} | {MEANINGS[status]} |" in page


def test_every_option_is_explained():
    for command in commands(_parser()):
        assert command.description, command.prog
        for name, meaning in described(command):
            assert meaning, f"{command.prog} {name}"


def test_interrupt_and_closed_pipe_have_their_statuses(monkeypatch, config):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("controlplane.cli.load", interrupted)
    assert main(["check", str(config)]) == ExitStatus.INTERRUPTED


@pytest.mark.long
def test_predictor_prints_a_table_or_json(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    lines = [{"prompt": f"Say {n}", "output_tokens": 10 + n % 7, "model": "m"} for n in range(300)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["predictor", "eval", str(log), "--max-examples", "200", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["answers"] == 300
    assert main(["predictor", "eval", str(log), "--max-examples", "200"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("300 requests\n") and "standard" in out
    to = tmp_path / "lengths.npz"
    assert main(["predictor", "train", str(log), "--max-examples", "200", "--to", str(to), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint": str(to), "requests": 200}
