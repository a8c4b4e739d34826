import logging
import signal

from pytest_aorta.launch.process.torchrun import _StoppedRanks


def test_ranks_that_torchrun_stops_are_read_from_its_log(tmp_path, caplog):
    for rank in range(3):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        (tmp_path / "ranks" / str(rank) / "pid").write_text(str(100 + rank))
    (tmp_path / "ranks" / "3").mkdir()
    (tmp_path / "ranks" / "3" / "pid").write_text("half")
    logger, stopped = logging.getLogger("test_torchrun"), _StoppedRanks(tmp_path)
    logger.addFilter(stopped)
    # The messages of torch 2.13.
    logger.warning("Sending process %s closing signal %s", 100, "SIGTERM")
    logger.warning("Sending process %s closing signal %s", 102, "SIGTERM")
    logger.warning(
        "Unable to shutdown process %s via %s, forcefully exiting via %s", 102, signal.SIGTERM, signal.SIGKILL
    )
    logger.warning("%s")
    assert stopped.signals == {100: signal.SIGTERM, 102: signal.SIGKILL}
    assert stopped.ranks() == [0, 2]
    assert len(caplog.records) == 4
