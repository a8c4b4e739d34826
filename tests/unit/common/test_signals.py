import os
import signal
import threading
from contextlib import suppress

import pytest

from pytest_aorta.common.processes import Terminated, terminable, uninterrupted


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_takes_effect_at_the_end_of_the_body(number, error):
    done = []

    def body() -> None:
        with terminable(), uninterrupted():
            os.kill(os.getpid(), number)
            done.append("after the signal")

    with pytest.raises(error):
        body()
    assert done == ["after the signal"]


def test_handlers_are_those_of_before():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with uninterrupted():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with suppress(ValueError), uninterrupted():
        raise ValueError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_error_of_the_body_is_the_context_of_the_interruption():
    def body() -> None:
        with terminable(), uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("own")

    with pytest.raises(Terminated) as caught:
        body()
    assert isinstance(caught.value.__context__, ValueError)


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_threads_are_not_affected():
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:  # noqa: BLE001 - any error fails the test
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert errors == []
