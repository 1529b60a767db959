"""The page at `/` in a real browser: two columns answer one prompt, the training tab draws the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.browser import BINARY, browsing
from tests.support.serving import EngineHarness, make_service, run_app

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="no Chromium here")]


def test_page_shows_two_columns_and_a_loss_curve(
    harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.training import TrainingLog

    lines = [{"current_steps": step, "total_steps": 9, "loss": 4 - step / 4} for step in range(1, 9)]
    lines.append({"current_steps": 8, "total_steps": 9, "eval_loss": 2.5})
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    app = create_app(make_service(harness, adapters), training=TrainingLog(tmp_path))
    with run_app(app) as url, browsing(url, tmp_path / "profile") as page:
        page.wait("typeof names !== 'undefined' && names.length === 3")
        assert page.run("[...at('adapter').options].map((one) => one.value)") == ["tiny:one", "tiny:attention"]
        page.run("at('tokens').value = 12; at('prompt').value = 'Hello'; at('ask').requestSubmit(); 1")
        page.wait("running === null && at('speed-0').textContent && at('speed-1').textContent", 90)
        speeds = [page.run(f"at('speed-{column}').textContent") for column in (0, 1)]
        assert all(speed.startswith("12 tokens, ") and speed.endswith("tokens/s") for speed in speeds)
        left, right = (page.run(f"at('talk-{column}').lastChild.textContent") for column in (0, 1))
        assert left and right and left != right
        assert page.run("document.querySelectorAll('.talk p.user').length") == 2
        page.run("at('tab-training').click(); 1")
        page.wait("points.length === 9")
        assert page.run("at('training-state').textContent") == f"{tmp_path}: step 8 of 9"
        assert page.run("document.querySelectorAll('#curve polyline').length") == 2
        assert page.run("document.querySelectorAll('#curve circle').length") == 9
        assert page.picture()[:4] == b"\x89PNG"
        assert not page.errors
        assert page.requests and all(one.startswith(url) or one == "data:," for one in page.requests)
