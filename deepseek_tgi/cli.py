"""`deepseek-tgi`: parsing, messages and exit codes; what does the work is imported by the command that needs it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_tgi import __version__
from deepseek_tgi.errors import DeepseekTgiError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_JSON = "--json"
Command = Callable[[argparse.Namespace], int]

EXIT_CODES = """exit codes:
  0 done, 1 failed (or a backend broke a rule), 2 wrong options, 3 unreadable model, 4 unsupported model,
  5 memory, disk, port or socket missing"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch works without it, and so do we
    try:
        own = {"launch": _launch, "info": _info, "probe": _probe}  # these read their options themselves
        if arguments and arguments[0] in own:
            return own[arguments[0]](arguments[1:])
        parsed = _parser().parse_args(arguments)
        command: Command = parsed.command
        return command(parsed)
    except DeepseekTgiError as error:
        print(f"deepseek-tgi: error: {str(error).removeprefix('deepseek-tgi ')}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-tgi",
        description="Serve DeepSeek-family models from 4-bit weights behind TGI's interfaces.",
        epilog=f"example:\n  deepseek-tgi quickstart\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepseek-tgi {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serving(commands)
    _add_models(commands)
    _add_changes(commands)
    _add_gpu(commands)
    _add_backends(commands)
    return parser


def _add(commands: Commands, name: str, command: Command, about: str, example: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=f"example:\n  deepseek-tgi {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(command=command)
    return added


def _add_serving(commands: Commands) -> None:
    quick = _add(
        commands, "quickstart", _quickstart, "serve a small model, ask it a question, go on serving", "quickstart"
    )
    quick.add_argument("--model-id", default="demo", help="demo, smollm2, a folder or a hub id (default demo)")
    quick.add_argument("--port", type=_port, default=3000, help="HTTP port on 127.0.0.1 (default 3000)")
    quick.add_argument("--question", default="What is the capital of France?", help="what to ask")
    quick.add_argument("--exit", action="store_true", help="stop after the answer")
    _add(
        commands,
        "launch",
        _unreachable,
        "serve a model with launcher options (launch --help)",
        "launch --model-id smollm2",
    )
    _add(
        commands,
        "info",
        _unreachable,
        "show what launcher options come to, and what a model needs",
        "info --model-id smollm2",
    )
    _add(commands, "probe", _unreachable, "ask a running server: live, ready or startup (probe --help)", "probe ready")
    shim = _add(
        commands, "shim", _shim, "write text-generation-server into a folder for TGI's own launcher", "shim ~/tgi-bin"
    )
    shim.add_argument("folder", type=Path, help="folder to put first on the launcher's PATH")
    shim.add_argument("--launcher", action="store_true", help="write text-generation-launcher too")
    shim.add_argument("--force", action="store_true", help="overwrite files that we did not write")


def _add_models(commands: Commands) -> None:
    fetch = _add(
        commands, "download-weights", _download, "make sure a model is on this machine", "download-weights smollm2"
    )
    fetch.add_argument("model_id", help="demo, smollm2, a folder or a hub id")
    fetch.add_argument("--revision", help="hub revision")
    gguf = _add(
        commands,
        "import-gguf",
        _import_gguf,
        "turn a GGUF file into a Hugging Face checkpoint",
        "import-gguf model.gguf out",
    )
    gguf.add_argument("source", type=Path, help="GGUF file of a llama-family model")
    gguf.add_argument("out", type=Path, help="folder to make; must not exist")
    quantize = _add(
        commands,
        "quantize",
        _quantize,
        "write a 4-bit AWQ checkpoint of a dense one",
        "quantize out out-awq --method rtn",
    )
    quantize.add_argument("source", type=Path, help="folder of a dense checkpoint")
    quantize.add_argument("out", type=Path, help="folder to make; must not exist")
    quantize.add_argument("--method", choices=["rtn"], default="rtn", help="rtn: round to nearest (default)")
    quantize.add_argument("--group-size", type=int, help="weights a scale (default: 128, 64 or 32)")


def _add_changes(commands: Commands) -> None:
    about = "show and change what a running server serves"
    added = _add(commands, "models", _unreachable, about, "models load my-model --url http://127.0.0.1:3000")
    verbs = added.add_subparsers(metavar="VERB", required=True)
    for verb, says in (
        ("list", "what is served and what could be"),
        ("status", "the same, and the changes so far"),
        ("load", "serve another model"),
        ("unload", "serve nothing"),
        ("sleep", "give the model's memory back until it is woken"),
        ("wake", "serve again"),
    ):
        one = verbs.add_parser(verb, help=says, description=says[0].upper() + says[1:] + ".")
        one.set_defaults(command=_models, verb=verb)
        one.add_argument("--url", default="http://127.0.0.1:3000", help="the server (default http://127.0.0.1:3000)")
        one.add_argument("--token", help="its admin token (default: DEEPSEEK_TGI_ADMIN_TOKEN)")
        if verb == "list":
            one.add_argument(_JSON, dest="as_json", action="store_true", help="print one object instead")
        if verb == "sleep":
            one.add_argument(
                "--drop-weights", action="store_true", help="give the weights back for good, and read them again"
            )
            one.add_argument("--keep-pages", action="store_true", help="keep the cache, so that it knows prompts yet")
        if verb == "load":
            one.add_argument("model_id", help="a name of the server's repository, a folder, demo, smollm2 or a hub id")
            one.add_argument("--revision", help="hub revision")
            one.add_argument("--quantize", help="refuse the model unless it is stored so")
            one.add_argument("--manifest-sha256", help="refuse it unless its SHA256SUMS file has this digest")
            one.add_argument("--plan", choices=["auto", "beside", "drain"], help="how (default auto)")
            one.add_argument("--socket", help="stem of the shards' sockets, for a server behind TGI's own router")


def _add_gpu(commands: Commands) -> None:
    tune = _add(
        commands,
        "tune",
        _tune,
        "measure which kernels are fastest for a model on this GPU",
        "tune --model-id /models/r1",
    )
    tune.add_argument("--model-id", help="demo, smollm2, a folder or a hub id: its INT4 weights are measured")
    tune.add_argument("--revision", help="hub revision")
    tune.add_argument("--num-shard", type=int, default=1, help="ranks the model is cut for (default 1)")
    tune.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="NxK[gG]",
        help="a weight of N outputs and K inputs in groups of G (default 128), instead; may be given again",
    )
    tune.add_argument("--rows", help="numbers of rows, 1,8,64 (default: 1 to 4096 in steps)")
    tune.add_argument("--device", default="cuda:0", help="GPU to measure on (default cuda:0)")
    tune.add_argument("--out", type=Path, help="file to write (default: the user's cache, where serving looks)")


def _add_backends(commands: Commands) -> None:
    _add(commands, "backends", _backends, "list the backends of --backend with their origin", "backends")
    check = _add(
        commands,
        "check-backend",
        _check_backend,
        "hold a backend to the rules of the ABI",
        "check-backend deepseek-quant",
    )
    check.add_argument("name", help="backend name, or module:Class")
    check.add_argument("--model-id", help="model to check with (default: a tiny one made for it)")


def _unreachable(parsed: argparse.Namespace) -> int:
    raise AssertionError("these commands read their options themselves and never get here")


def _port(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 6 and 1 <= int(given) <= 65535):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number from 1 to 65535")
    return int(given)


def _launch(argv: list[str]) -> int:
    from deepseek_tgi.config import DEFAULT_BACKEND
    from deepseek_tgi.launcher import main as launcher

    named = any(a == "--backend" or a.startswith("--backend=") for a in argv)
    given = named or bool(os.environ.get("DEEPSEEK_TGI_BACKEND"))
    return launcher.main(argv if given else ["--backend", DEFAULT_BACKEND, *argv])


def _info(argv: list[str]) -> int:
    from deepseek_tgi.config import LauncherConfig, read
    from deepseek_tgi.launcher.plan import make_plan
    from deepseek_tgi.launcher.plan_text import plan_lines, plan_object
    from deepseek_tgi.options import Program, flag_of, options_of

    about = "Show each launcher option's value and where it comes from, and what the model needs; no weight is read."
    example = f"example:\n  deepseek-tgi info --model-id smollm2 --num-shard 2\n\n{_JSON} prints one object instead."
    given = [argument for argument in argv if argument != _JSON]
    resolved = read(LauncherConfig, Program("deepseek-tgi info", about, epilog=example), given, os.environ)
    rows = []
    for name, spec in options_of(LauncherConfig).items():
        value = "***" if spec.secret and getattr(resolved.config, name) else getattr(resolved.config, name)
        rows.append((flag_of(name) if spec.flag else spec.env[0], value, resolved.origins[name]))
    if given != argv:
        options = {flag: {"value": value, "from": origin} for flag, value, origin in rows}
        model = plan_object(make_plan(resolved.config))
        print(json.dumps({"options": options, "model": model}, indent=2))
        return 0
    for flag, value, origin in rows:
        print(f"{flag:<32} {'-' if value in (None, ()) else value!s:<32} {origin}")
    for line in ["", *plan_lines(make_plan(resolved.config))]:
        print(line)
    return 0


def _probe(argv: list[str]) -> int:
    from deepseek_tgi.probes import exec_probe

    return exec_probe.run(argv, os.environ)


def _quickstart(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.launcher import quickstart

    wish = quickstart.Wish(parsed.model_id, parsed.port, parsed.question, parsed.exit)
    return quickstart.run(wish, quickstart.write_through)


def _shim(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.launcher import shim

    names = ["text-generation-server"] + (["text-generation-launcher"] if parsed.launcher else [])
    for path in shim.write(parsed.folder, names, parsed.force):
        print(f"wrote {path}")
        found = shim.first_on_path(path.name)
        if found is None or not os.path.samefile(found, path):
            print(f"  {path.name} now means {found or 'nothing'}; put {path.parent} first on PATH to use ours")
    return 0


def _download(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.adapters.hub import SMALL_MODEL_ID
    from deepseek_tgi.config import DownloadConfig
    from deepseek_tgi.server.weights import prepare

    if parsed.model_id == SMALL_MODEL_ID and not Path(SMALL_MODEL_ID).is_dir():
        from deepseek_tgi.convert.small_model import ensure_small_model

        # As Ctrl-C does: what was made so far, up to 400 MB, is removed on the way out.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        print(ensure_small_model(progress=sys.stderr.isatty()))
    else:
        print(prepare(DownloadConfig(parsed.model_id, parsed.revision)))
    return 0


def _import_gguf(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.convert.import_gguf import import_gguf

    import_gguf(parsed.source, parsed.out, sys.stderr.isatty())
    print(f"wrote {parsed.out}")
    return 0


def _quantize(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.convert.quantize import quantize_rtn

    quantize_rtn(parsed.source, parsed.out, parsed.group_size, sys.stderr.isatty())
    print(f"wrote {parsed.out}")
    return 0


def _tune(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.adapters.devices import resolve_device
    from deepseek_tgi.errors import ConfigError
    from deepseek_tgi.kernels.int4_linear import tune

    shapes = [tune.parse(text) for text in parsed.weight]
    if parsed.model_id:
        from deepseek_tgi.adapters.packed_shapes import int4_shapes

        shapes += [tune.Wanted(*each) for each in int4_shapes(parsed.model_id, parsed.revision, parsed.num_shard)]
    if not shapes:
        raise ConfigError("tune: no INT4 weight to measure; give --model-id of a model that has some, or --weight")
    rows = tune.parse_rows(parsed.rows)
    device = resolve_device(parsed.device)
    path, lines = tune.run(device, sorted(set(shapes)), rows, parsed.out, progress=sys.stderr.isatty())
    for line in lines:
        print(line)
    print(f"wrote {path}")
    return 0


def _models(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.launcher import models

    def say(line: str) -> None:
        print(line, flush=True)

    known = ("model_id", "revision", "quantize", "manifest_sha256", "plan", "drop_weights", "keep_pages")
    fields = {name: value for name in known if (value := getattr(parsed, name, None)) is not None}
    if getattr(parsed, "socket", None):
        fields.pop("plan", None)
        return models.load_behind_tgi(parsed.socket, fields.pop("model_id"), fields, say)
    door = models.Door(parsed.url.rstrip("/"), parsed.token or os.environ.get(models.TOKEN))
    if parsed.verb == "list":
        return models.show(door, say, parsed.as_json)
    if parsed.verb == "status":
        return models.show(door, say, as_json=False) or models.history(door, say)
    if "model_id" in fields and Path(fields["model_id"]).is_dir() and os.sep in fields["model_id"]:
        fields["model_id"] = str(Path(fields["model_id"]).resolve())
    return models.change(door, parsed.verb, fields, say)


def _backends(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.registry import list_backends

    for info in list_backends():
        print(f"{info.name:<24} {info.distribution} {info.version}  {info.target}")
    return 0


def _check_backend(parsed: argparse.Namespace) -> int:
    from deepseek_tgi.adapters.abi_check import format_table, run_checks
    from deepseek_tgi.registry import load_backend

    results = run_checks(load_backend(parsed.name), parsed.model_id)
    print(format_table(results))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
