"""Verifiers that do what a response tells them to; worker processes of the tests load them by name."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

from megatron_hacpo.reward import BadGroundTruth

_KEPT: list[bytearray] = []


def obey(text: str, answer: str) -> object:
    """Do what the first word of the text says, with the second as argument."""
    command, _, argument = text.partition(" ")
    return _COMMANDS[command](argument)


async def obey_later(text: str, answer: str) -> object:
    """As `obey`, as a coroutine function."""
    await asyncio.sleep(0.0)
    return obey(text, answer)


def length(text: str, answer: str) -> float:
    """Characters of the text over 1,000."""
    return len(text) / 1000


def _raise(argument: str) -> object:
    raise KeyError(argument)


def _refuse(argument: str) -> object:
    raise BadGroundTruth(argument)


def _hang(argument: str) -> object:
    while True:
        pass


def _hang_in_c(argument: str) -> object:
    return math.factorial(10**9)


def _eat(argument: str) -> object:
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (1 << 20)))


def _eat_and_hide(argument: str) -> object:
    """Take more than allowed faster than anybody looks, give it back and say that all was well."""
    del [bytearray(b"x" * int(argument))][0]
    return 1.0


def _leak(argument: str) -> object:
    _KEPT.append(bytearray(b"x" * int(argument)))
    return float(os.getpid())


def _child(argument: str) -> object:
    """Start a process that outlives everybody, tell its number, and hang."""
    child = subprocess.Popen(["sleep", "1000"])
    with open(argument, "w", encoding="ascii") as file:
        file.write(f"{os.getpid()} {child.pid}")
    return _hang(argument)


def _sleep(argument: str) -> object:
    time.sleep(float(argument))
    return 1.0


def _work(argument: str) -> object:
    """So many seconds of processor time."""
    end = time.process_time() + float(argument)
    while time.process_time() < end:
        pass
    return 1.0


_COMMANDS = {
    "give": float,
    "true": lambda argument: True,
    "none": lambda argument: None,
    "text": lambda argument: argument,
    "list": lambda argument: [1.0] * int(argument),
    "raise": _raise,
    "refuse": _refuse,
    "leave": lambda argument: sys.exit(int(argument)),
    "exit": lambda argument: os._exit(int(argument)),
    "crash": lambda argument: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": _hang,
    "hang_in_c": _hang_in_c,
    "eat": _eat,
    "eat_and_hide": _eat_and_hide,
    "ask_too_much": lambda argument: len(bytearray(1 << 60)),
    "leak": _leak,
    "child": _child,
    "pid": lambda argument: float(os.getpid()),
    "sleep": _sleep,
    "work": _work,
}
