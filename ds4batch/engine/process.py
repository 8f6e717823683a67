"""The engine process: owns the device, steps while there is work, and leaves when the front does.

Started by the front as `python -m ds4batch.engine.process --fd N`; see ds4batch.messages for what goes over the socket.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys

import ds4batch.messages as m
from ds4batch import logs
from ds4batch.engine import heap
from ds4batch.engine.channel import Channel, FrontGone
from ds4batch.settings import Settings

log = logging.getLogger(__name__)


def main() -> int:
    """Serve the front at the other end of --fd until it leaves or says so."""
    parser = argparse.ArgumentParser(prog="ds4batch.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel(parser.parse_args().fd)
    # A signal for the whole process group is the front's to answer: it sends Shutdown, or its end closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        settings = channel.settings()
        logs.configure(settings.log_format, settings.log_level, engine=True)
        channel.start()
        _serve(channel, settings)
    except FrontGone:
        return 0
    finally:
        channel.close()
    return 0


def _serve(channel: Channel, settings: Settings) -> None:
    heap.load()
    try:
        if settings.script:
            from ds4batch.scripted.start import start
        else:
            from ds4batch.engine.start import start
        ready, service = start(settings, channel.wake)
    except (OSError, ValueError) as error:
        channel.send(m.StartFailed(str(error)))
        return
    channel.send(ready)
    gc.collect()
    gc.freeze()  # the model's objects stay; later collections need not walk them
    heap.serve()
    while True:
        # Once it is stopping nothing more need come: the step that ended the last request leaves nothing to wait for.
        for message in channel.receive(wait=service.blocked if service.busy else not service.stopping):
            if isinstance(message, m.Ping):
                channel.send(m.Pong())
            else:
                service.handle(message)
        if service.busy:
            channel.send(service.step())
        elif service.stopping:
            service.close()
            channel.send(m.Bye())
            return


if __name__ == "__main__":
    sys.exit(main())
