"""`torchair.logger`: to stdout, ERROR and above unless told; one level of its own, EVENT."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, TextIO

EVENT_LEVEL = 35


class Logger(logging.Logger):
    """A logger with `event` and `warning_once`."""

    def event(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Between a warning and an error: something the user wants to know of."""
        if self.isEnabledFor(EVENT_LEVEL):
            self._log(EVENT_LEVEL, message, args, **kwargs)

    def warning_once(self, message: str, *args: Any, **kwargs: Any) -> None:
        """A warning, the first time it is given with these arguments."""
        said: set[Any] = self.__dict__.setdefault("_said", set())
        if (message, args) not in said:
            said.add((message, args))
            self.warning(message, *args, **kwargs)


class _Stdout(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stdout` is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None: ...


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        who = f"TORCHAIR({record.process},{os.path.basename(sys.executable)})"
        where = f"[{record.filename}:{record.lineno}]{record.thread}"
        said = record.getMessage()
        if record.exc_info:
            said += f"\n{self.formatException(record.exc_info)}"
        when = f"{second}.{micros // 1000:03d}.{micros % 1000:03d}"
        return f"[{record.levelname}] {who}:{when} {where} {said}"


def _make() -> Logger:
    logging.addLevelName(EVENT_LEVEL, "EVENT")
    usual = logging.getLoggerClass()
    logging.setLoggerClass(Logger)
    try:
        made = logging.getLogger("torchair")
    finally:
        logging.setLoggerClass(usual)
    assert isinstance(made, Logger)
    handler = _Stdout()
    handler.setFormatter(_Format())
    made.addHandler(handler)
    made.propagate = False
    debug = os.environ.get("TORCH_COMPILE_DEBUG") == "1"
    made.setLevel(logging.DEBUG if debug else logging.ERROR)
    return made


logger = _make()
