"""`python -m rollmill.engine.embedded MODEL`: the engine as a process of its own.

Exit codes: 0 after SIGINT, SIGTERM or the end of stdin; 2 for errors that the user can mend.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from pydantic import ValidationError

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded.ports import bind
from rollmill.errors import ConfigError, RollmillError

# Before torch is imported: idle OpenMP threads sleep instead of spinning, because the engine
# shares its cores with a driver and a trainer.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, serve, and return the exit code."""
    options = _parser().parse_args(argv)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = _read_config(options.config_json)
        listener = bind(options.host, options.port)
        from rollmill.engine.embedded import server

        if options.exit_with_stdin:
            server.exit_with_stdin()
        server.serve(
            options.model,
            config,
            host=options.host,
            port=options.port,
            context_length=options.context_length,
            tokenizer_path=options.tokenizer,
            weight_version=options.weight_version,
            listener=listener,
        )
    except RollmillError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    server.exit_now(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollmill.engine.embedded", description="Serve a model over HTTP."
    )
    parser.add_argument("model", help="model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port")
    parser.add_argument("--config-json", default="{}", help="engine.embedded settings as JSON")
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--tokenizer", default=None, help="tokenizer folder, if not the model's")
    parser.add_argument("--weight-version", default="default", help="name of the first weights")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end at once when stdin closes"
    )
    return parser


def _read_config(text: str) -> EmbeddedEngineConfig:
    try:
        return EmbeddedEngineConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"--config-json is not valid: {error}", where="engine.embedded", found=text
        ) from error


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread may still wait on stdin, and Python would abort because of it
