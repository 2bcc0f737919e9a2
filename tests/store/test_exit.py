"""Leaving the interpreter: whatever way a script ends, its newest save is whole and nothing is noisy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepwell
from tests.store.scripts import ROOT, Scripts

#: three storage tiers need no more than this; the far one can be stalled
HEAD = """
import atexit, logging, os, signal, sys, threading, time
import torch, stepwell
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
folder = sys.argv[1]
state = {"w": torch.arange(3_000_000)}
"""

OPEN = HEAD + "store = stepwell.open(folder + '/run')\n"

ENDS = {
    "the last line": ("store.save(1, state)", 0),
    "sys.exit": ("store.save(1, state); sys.exit(0)", 0),
    "sys.exit with a code": ("store.save(1, state); sys.exit(3)", 3),
    "an exception": ("store.save(1, state); raise ValueError('mine')", 1),
    "a with block": ("with store:\n    store.save(1, state)", 0),
    "a with block left by an exception": ("with store:\n    store.save(1, state)\n    raise ValueError('mine')", 1),
    "a with block left by sys.exit": ("with store:\n    store.save(1, state)\n    sys.exit(4)", 4),
    "another thread lives longer": ("threading.Thread(target=time.sleep, args=[0.2]).start(); store.save(1, state)", 0),
    "another thread saves": ("threading.Thread(target=store.save, args=(1, state)).start()", 0),
    "a save in an atexit handler": ("atexit.register(lambda: store.save(1, state))", 0),
    "a store opened in an atexit handler": (
        "store.close()\natexit.register(lambda: stepwell.open(folder + '/run').save(1, state))",
        0,
    ),
    "the store is dropped": ("store.save(1, state); del store", 0),
    "the store is in a cycle": ("store.save(1, state); store.me = store; del store", 0),
    "closed and saved no more": ("store.save(1, state); store.close()", 0),
    "closed in an atexit handler": ("store.save(1, state); atexit.register(store.close)", 0),
    "nothing is done with it": ("store.save(1, state).wait(); stepwell.open(folder + '/run')", 0),
}


@pytest.mark.parametrize("way", ENDS)
def test_B8_the_newest_save_outlives_the_script(tmp_path: Path, scripts: Scripts, way: str) -> None:
    """Cases B8 and B9."""
    code, status = ENDS[way]
    ended = scripts.run(OPEN + code, tmp_path)
    assert ended.status == status, ended.err
    if status == 1:  # the script's own exception and nothing else
        assert ended.err.count("Traceback") == 1 and ended.err.rstrip().endswith("ValueError: mine"), ended.err
    else:
        assert ended.err == ""
    assert torch.equal(stepwell.load(tmp_path / "run")["w"], torch.arange(3_000_000))


@pytest.mark.slow
def test_a_script_of_its_own_ends_as_well(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "dev", "-c", OPEN + "store.save(1, state)", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    ours = [line for line in done.stderr.splitlines() if "stepwell" in line]  # torch warns in this mode, too
    assert done.returncode == 0 and ours == [], done.stderr
    assert torch.equal(stepwell.load(tmp_path / "run")["w"], torch.arange(3_000_000))


AGAIN = {
    "in an atexit handler": "atexit.register(lambda: store.save(1, state))",
    "dropped": "store.save(1, state); del store",
    "interrupted": """
save = store.save(1, state)
try:
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
    while True:
        save.wait()
except KeyboardInterrupt:
    pass
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", AGAIN)
def test_B9_again_and_again(tmp_path: Path, scripts: Scripts, way: str) -> None:
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        ended = scripts.run(OPEN + AGAIN[way], tmp_path / str(number))
        assert (ended.status, ended.err) == (0, ""), (number, ended)
        assert ended.seconds < 20
        assert torch.equal(stepwell.load(tmp_path / str(number) / "run")["w"], torch.arange(3_000_000))


# -- a tier that hangs or fails ------------------------------------------------------------------

STUCK = (
    HEAD
    + """
for name in ("near", "far"):
    os.makedirs(folder + "/" + name, exist_ok=True)
near, far = FileTier(folder + "/near", name="near"), Faulty(FileTier(folder + "/far", name="far"), [])
store = stepwell.open(run="run", tiers=[near, far], exit_timeout=float(sys.argv[2]))
store.save(1, state).wait("far")
far.plan = [Fault("write", 1, "stall", times=10**9)]
store.save(2, state).wait("near")

def interrupt_when(what):
    def work():
        while not what():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=work, daemon=True).start()

def waits_in(function):
    frame, names = sys._current_frames().get(threading.main_thread().ident), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:1] == ["wait"] and function in names
"""
)

STUCK_ENDS = {
    "the last line": ("", 0),
    "sys.exit": ("sys.exit(5)", 5),
    "the store is dropped": ("del store", 0),
    "a with block left by an exception": ("with store:\n    raise SystemExit(6)", 6),
}


@pytest.mark.parametrize("way", STUCK_ENDS)
def test_a_stuck_tier_holds_the_exit_up_only_so_long(tmp_path: Path, scripts: Scripts, way: str) -> None:
    code, status = STUCK_ENDS[way]
    ended = scripts.run(STUCK + code, tmp_path, 0.5)
    assert ended.status == status, ended.err
    assert 0.5 < ended.seconds < 30
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err  # no terminal: no progress line
    for words in ("run run unfinished", "500 ms", "step 2 to far", "step 2 on near, step 1 on far", "next store"):
        assert words in lines[0], ended.err


def test_a_failing_tier_is_told_at_the_exit(tmp_path: Path, scripts: Scripts) -> None:
    code = "far.release(); far.plan = [Fault('reserve', 1, times=10**9)]; store.save(3, state)"
    ended = scripts.run(STUCK + code, tmp_path, 60)
    assert ended.status == 0
    last = ended.err.strip().splitlines()[-1]
    assert "unfinished" in last and "cannot reserve (injected)" in last and "step 3 on near" in last, ended.err


def test_the_exit_shows_one_progress_line_and_ctrl_c_abandons(tmp_path: Path, scripts: Scripts) -> None:
    code = """
from stepwell import ending
shown, write_line = [], ending.write_line
ending.write_line = lambda text: (write_line(text), shown.append(text))
interrupt_when(lambda: shown)
"""
    ended = scripts.run(STUCK + code, tmp_path, 100, terminal=True)
    assert ended.status == 0 and ended.seconds < 30
    line = r"\r\x1b\[Kstepwell: writing the newest checkpoint of run, \d+ s \(gives up in 1 min \d+ s; Ctrl-C aband"
    assert re.search(line, ended.err), ended.err
    after = ended.err.rpartition("\r\x1b[K")[2]
    assert after == (
        "stepwell: abandoned what was under way; newest checkpoint of run run: step 2 on near, step 1 on far\r\n"
    )
    assert "Traceback" not in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize("where", ["store.close()", "save.wait('far')", "with store: threading.Event().wait()"])
def test_the_second_ctrl_c_abandons(tmp_path: Path, scripts: Scripts, where: str) -> None:
    """The first one ends the script; it is waited for what the script has saved."""
    code = f"""
interrupts = []
def handler(*_):
    interrupts.append(1)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
save = store.save(3, state)
def hang():
    {where}
interrupt_when(lambda: waits_in("hang"))
interrupt_when(lambda: interrupts and waits_in("wait_with_line"))
hang()
"""
    ended = scripts.run(STUCK + code, tmp_path, 100)
    assert ended.status in (130, -2, 1) and ended.seconds < 30, ended.err
    assert ended.err.count("Traceback") == 1 and "KeyboardInterrupt" in ended.err, ended.err
    assert ended.err.count("abandoned what was under way; newest checkpoint of run run:") == 1
    assert "step 1 on far" in ended.err


def test_after_one_ctrl_c_the_exit_finishes(tmp_path: Path, scripts: Scripts) -> None:
    code = """
interrupt_when(lambda: waits_in("close"))
def release():
    while not waits_in("wait_with_line"):
        time.sleep(0.005)
    store._runtime.loop.call_soon_threadsafe(far.release)
threading.Thread(target=release, daemon=True).start()
store.close()
"""
    ended = scripts.run(STUCK + code, tmp_path, 100)
    assert "KeyboardInterrupt" in ended.err and "abandoned" not in ended.err and "unfinished" not in ended.err
    assert torch.equal(stepwell.load(f"{tmp_path}/far/run@2")["w"], torch.arange(3_000_000))


def test_log_handlers_that_are_gone_make_no_noise(tmp_path: Path, scripts: Scripts) -> None:
    code = """
import io
stream = io.StringIO()
logging.basicConfig(stream=stream, level=logging.DEBUG, force=True)
stream.close()
"""
    ended = scripts.run(STUCK + code, tmp_path, 0.3)
    assert ended.status == 0 and "Traceback" not in ended.err and "Logging error" not in ended.err, ended.err


def test_stderr_that_is_gone_makes_no_noise(tmp_path: Path, scripts: Scripts) -> None:
    ended = scripts.run(STUCK + "sys.stderr = None", tmp_path, 0.3)
    assert (ended.status, ended.err) == (0, "")


def test_a_save_after_the_stores_were_closed_says_so(tmp_path: Path, scripts: Scripts) -> None:
    """An atexit handler that is older than stepwell runs after it."""
    code = """
def late():
    try:
        store.save(1, state)
    except stepwell.StoreClosed as error:
        print(error)
from stepwell import ending
atexit.unregister(ending._at_exit)
atexit.register(late)
atexit.register(ending._at_exit)
"""
    ended = scripts.run(OPEN + code, tmp_path)
    assert (ended.status, ended.err) == (0, "") and "the store is closed" in ended.out


def test_no_thread_need_be_started_at_the_exit(tmp_path: Path, scripts: Scripts) -> None:
    """Python 3.12 refuses to."""
    code = """
def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def late():
    threading.Thread.start = refuse
    store.save(2, {"w": torch.arange(20_000_000)})
store.save(1, state)
atexit.register(late)
"""
    ended = scripts.run(OPEN + code, tmp_path)
    assert (ended.status, ended.err) == (0, "")
    assert torch.equal(stepwell.load(tmp_path / "run")["w"], torch.arange(20_000_000))
