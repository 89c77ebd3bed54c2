"""Weights & Biases and TensorBoard: what they get, and that they never stop a run."""

import io
import json
import logging
import os
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from detr.telemetry.loggers import (
    TensorboardLogger,
    WandbLogger,
)


class TestWandb:
    def make(self, tmp_path: Path, **changes: Any) -> WandbLogger:
        return WandbLogger(**{"project": "test", "name": "run", "output_dir": tmp_path, **changes})

    def fake(self, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
        module = types.ModuleType("wandb")
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        module.Settings = dict  # type: ignore[attr-defined]
        module.setup = lambda settings: None  # type: ignore[attr-defined]
        for name, part in parts.items():
            setattr(module, name, part)
        monkeypatch.setitem(sys.modules, "wandb", module)

    @pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("service died"), KeyError("x")])
    def test_a_failing_start_is_reported_once(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ):
        attempts = []

        def fail(**settings: Any) -> None:
            attempts.append(settings)
            raise error

        self.fake(monkeypatch, init=fail)
        logger = self.make(tmp_path)
        with caplog.at_level(logging.WARNING):
            logger.log(1, {"a": 1.0})
            logger.log(2, {"a": 1.0})
            logger.close()
        assert len(attempts) == 1
        (record,) = caplog.records
        assert "training goes on" in record.message
        assert str(error) in record.message

    def test_a_failure_in_the_middle_is_reported_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        logged: list[dict[str, float]] = []

        class Run:
            def define_metric(self, name: str, *, step_metric: str) -> None:
                assert (name, step_metric) == ("*", "step")

            def log(self, values: dict[str, float]) -> None:
                if values["step"] > 1:
                    raise BrokenPipeError("the service is gone")
                logged.append(values)

            def finish(self) -> None:
                pytest.fail("a dead run must not be finished: that could hang")

        self.fake(monkeypatch, init=lambda **settings: Run())
        logger = self.make(tmp_path)
        with caplog.at_level(logging.WARNING):
            for step in (1, 2, 3):
                logger.log(step, {"a": 1.0})
            logger.close()
            # the fake has neither Image nor Table, which would raise too
            logger.log_images(4, "b", {"c": np.zeros((2, 2, 3), dtype=np.uint8)})
            logger.log_table(4, "b", ["c"], [[1.0]])
            logger.close()
        assert logged == [{"a": 1.0, "step": 1}]
        assert len(caplog.records) == 1

    def test_a_picture_that_fails_does_not_stop_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        def fail(*arguments: Any, **settings: Any) -> None:
            raise RuntimeError("the disk of media is full")

        self.fake(monkeypatch, init=lambda **settings: pytest.fail("started"), Image=fail)
        logger = self.make(tmp_path)
        with caplog.at_level(logging.WARNING):
            logger.log_images(1, "b", {"c": np.zeros((2, 2, 3), dtype=np.uint8)})
            logger.log(2, {"a": 1.0})
            logger.close()
        [record] = caplog.records
        assert "the disk of media is full" in record.message

    def test_a_resumed_run_goes_on_under_its_id_with_its_config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        starts: list[dict[str, Any]] = []

        class Run:
            def define_metric(self, name: str, *, step_metric: str) -> None: ...
            def log(self, values: dict[str, float]) -> None: ...
            def finish(self) -> None: ...

        def init(**settings: Any) -> Run:
            starts.append(settings)
            return Run()

        self.fake(monkeypatch, init=init)
        (tmp_path / "config.yaml").write_text("model:\n  num_queries: 300\n")
        for _ in range(2):
            logger = self.make(tmp_path, config_path=tmp_path / "config.yaml", tags=("a",), mode="offline")
            assert len(starts) in (0, 1)
            logger.log(1, {"a": 1.0})
            logger.close()
        assert starts[0] == starts[1]
        assert starts[0]["resume"] == "allow"
        assert len(starts[0]["id"]) == 8
        assert starts[0]["config"] == {"model": {"num_queries": 300}}
        assert (starts[0]["tags"], starts[0]["mode"]) == (["a"], "offline")

    def test_nothing_starts_before_the_first_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        # hydra builds loggers on every rank, but only rank 0 logs
        self.fake(monkeypatch, init=lambda **settings: pytest.fail("started"))
        self.make(tmp_path).close()
        assert list(tmp_path.iterdir()) == []

    def test_settings_are_checked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(ValueError, match=r"logger\.wandb\.mode=of is unknown"):
            self.make(tmp_path, mode="of")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match="pip install wandb"):
            self.make(tmp_path)

    def test_offline_needs_no_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        connect = socket.socket.connect

        def connect_here(self: socket.socket, address: Any) -> None:
            # wandb talks to its own process on this machine
            if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost"):
                raise OSError(f"no network: {address}")
            connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", connect_here)
        monkeypatch.setenv("WANDB_SILENT", "true")
        for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SILENT"]:
            monkeypatch.delenv(name)
        logger = self.make(tmp_path, mode="offline")
        with caplog.at_level(logging.WARNING, logger="detr"):
            logger.log(1, {"train/loss": 1.0})
            logger.log(2, {"train/loss": float("nan")})
            picture = np.zeros((40, 60, 3), dtype=np.uint8)
            picture[:, :30, 0] = 200
            logger.log_images(2, "val/pictures", {"image 7": picture, "image 9": picture[:20]})
            rows = [["cat", 3, 0.5], ["dog", 0, None], ["cow", 1, float("nan")]]
            logger.log_table(2, "val/classes", ["class", "objects", "AP"], rows)
            logger.close()
        assert caplog.text == ""
        [record] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        media = record.parent / "files" / "media"
        pictures = [Image.open(path) for path in (media / "images" / "val" / "pictures").iterdir()]
        assert {picture.size for picture in pictures} == {(60, 40), (60, 20)}
        for each in pictures:
            assert each.getpixel((10, 10))[0] > 180
            assert max(each.getpixel((50, 10))) < 20
        [table] = (media / "table" / "val").iterdir()
        assert json.loads(table.read_text())["data"] == [["cat", 3, 0.5], ["dog", 0, None], ["cow", 1, None]]
        # the record of the run points at them; wandb's process writes it some time after `close`
        names = (b"val/pictures/image 7", b"val/pictures/image 9", b"val/classes")
        give_up_s = time.monotonic() + 20
        while missing := [name for name in names if name not in record.read_bytes()]:
            assert time.monotonic() < give_up_s, missing
            time.sleep(0.1)


class TestTensorboard:
    def test_values_can_be_read_back(self, tmp_path: Path):
        event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        logger = TensorboardLogger(tmp_path / "events")
        assert not (tmp_path / "events").exists()
        logger.log(5, {"train/loss": 1.5, "train/grad_norm": float("nan")})
        logger.log(6, {"train/loss": 1.25})
        logger.close()
        events = event_accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
        assert events.Tags()["scalars"] == ["train/loss"]
        assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 1.5), (6, 1.25)]

    def test_pictures_and_tables_can_be_read_back(self, tmp_path: Path):
        event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        logger = TensorboardLogger(tmp_path)
        picture = np.zeros((40, 60, 3), dtype=np.uint8)
        picture[:, :30, 0] = 200
        for step in (5, 6):
            logger.log_images(step, "val/pictures", {"image 7": picture})
        logger.log_table(6, "val/classes", ["class", "AP"], [["a|b", 0.25], ["dog", None], ["cow", 3]])
        logger.close()
        events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
        assert events.Tags()["images"] == ["val/pictures/image 7"]
        first, second = events.Images("val/pictures/image 7")
        assert (first.step, second.step) == (5, 6)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(second.encoded_image_string))), picture)
        [text] = events.Tensors("val/classes/text_summary")
        assert text.tensor_proto.string_val[0].decode() == (
            "| class | AP |\n| --- | --- |\n| a\\|b | 0.25 |\n| dog | - |\n| cow | 3 |"
        )

    def test_a_failure_is_reported_once_and_stops_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        pytest.importorskip("tensorboard")
        (tmp_path / "file").write_text("")
        logger = TensorboardLogger(tmp_path / "file" / "events")
        logger.log(1, {"train/loss": 1.0})
        logger.log_images(1, "val/pictures", {"image 7": np.zeros((4, 4, 3), dtype=np.uint8)})
        logger.log_table(1, "val/classes", ["class"], [["dog"]])
        logger.close()
        assert caplog.text.count("TensorBoard failed and is off for the rest of the run") == 1

    def test_a_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'deformable-detr\[tensorboard\]'"):
            TensorboardLogger(tmp_path)
