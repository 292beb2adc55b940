"""The command line of one service, derived from its config class.

All a `__main__.py` needs is `run_service(EncoderConfig, "encoder_svc.app:main")`. Exit codes: 0
after an orderly end, 1 for a failure of the world (a port in use), 2 for settings that cannot be.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from chiasm import __version__
from chiasm.config import DecoderConfig, EncoderConfig, GatewayConfig
from chiasm.config.load import ENV_PREFIX, REQUIRED, Setting, dump, load, settings
from chiasm.errors import ChiasmError
from chiasm.logs import setup_logging

CONFIG_CLASSES: tuple[type, ...] = (EncoderConfig, DecoderConfig, GatewayConfig)
CONFIG_FILE_ENV = f"{ENV_PREFIX}CONFIG"

logger = logging.getLogger(__name__)


def run_service(config_class: type, target: str) -> None:
    """Parses the command line and runs `target` ("module:function") with it. Never returns."""
    sys.exit(serve(config_class, target, sys.argv[1:], os.environ))


def serve(config_class: type, target: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """`run_service` with its inputs as arguments and the exit code as result."""
    module_name, _, function_name = target.partition(":")
    program = module_name.partition(".")[0]
    try:
        config = parse(config_class, program, arguments, env)
        if config is None:
            return 0
        setup_logging(config.server.log_level)
        main: Callable[[Any], None] = getattr(importlib.import_module(module_name), function_name)
        main(config)
    except (ValueError, CycloptsError) as error:
        return _complain(program, error, 2)
    except (ChiasmError, OSError) as error:
        return _complain(program, error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def parse(
    config_class: type, program: str, arguments: Sequence[str], env: Mapping[str, str]
) -> Any | None:
    """The effective config, or None when the command line only asked for a print-out.

    Raises:
        ValueError: Settings that cannot be.
        CycloptsError: Flags that cannot be.
    """
    app = App(
        name=program,
        help=inspect.getdoc(config_class),
        help_epilogue=_EPILOGUE,
        version=__version__,
        help_format="plaintext",
    )
    app.default(_signature(config_class))
    command, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    if command is not app.default_command:  # --help, --version
        command(*bound.args, **bound.kwargs)
        return None
    given = dict(bound.kwargs)
    file = given.pop("config", None) or env.get(CONFIG_FILE_ENV)
    only_print = given.pop("print_config", False)
    config: Any = load(
        config_class,
        file=Path(file) if file else None,
        env=env,
        flags=given,
        known_env=_known_env(),
    )
    if only_print:
        print(dump(config), end="")
        return None
    return config


_EPILOGUE = (
    f"Every setting is also an environment variable ({ENV_PREFIX}LOG_LEVEL for --log-level) and a "
    "key of the --config file. Flags win over the environment, the environment over the file."
)


def _known_env() -> frozenset[str]:
    shared = {setting.env for cls in CONFIG_CLASSES for setting in settings(cls)}
    return frozenset(shared | {CONFIG_FILE_ENV})


def _signature(config_class: type) -> Callable[..., Any]:
    """A function whose keyword parameters are the tree's leaves; None stands for "not given"."""
    parameters = [_parameter(setting) for setting in settings(config_class)]
    parameters += [
        _keyword(
            "config",
            Path,
            Parameter(help="YAML, TOML or JSON file, nested as --print-config shows."),
        ),
        _keyword(
            "print_config",
            bool,
            Parameter(help="Print the effective settings as YAML and exit.", negative=()),
        ),
    ]

    def collect(**given: Any) -> dict[str, Any]:
        return given

    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return collect


def _parameter(setting: Setting) -> inspect.Parameter:
    is_list = setting.type == tuple[str, ...]
    text = setting.help
    if setting.default is not REQUIRED and setting.default not in ("", ()):
        text += f" [{str(setting.default).lower() if setting.type is bool else setting.default}]"
    return _keyword(
        setting.name,
        setting.type,
        Parameter(
            help=text, consume_multiple=is_list, negative=None if setting.type is bool else ()
        ),
    )


def _keyword(name: str, kind: Any, parameter: Parameter) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, Parameter(show_default=False), parameter],
    )


def _complain(program: str, error: Exception, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"{program}: error: {text}", file=sys.stderr, flush=True)
    logger.debug("stopped by", exc_info=error)
    return code
