"""Plans against the reference processor: grids and counts of sizes and clips drawn at random."""

from __future__ import annotations

import random

import pytest
import torch

from tests import torchvision_ops

torchvision_ops.declare()

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: E402
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import (  # noqa: E402
    Qwen2VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata  # noqa: E402

from chiasm.errors import InvalidRequest  # noqa: E402
from chiasm.plan import Modality  # noqa: E402
from gateway.media.header import MediaHeader  # noqa: E402
from gateway.messages import MediaOptions  # noqa: E402
from gateway.planning.qwen2_5_vl import Qwen25VLPlanner  # noqa: E402

IMAGE = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
VIDEO = {
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24},
    "cap_pixels_per_frame": True,
    "max_video_tokens": 300,
}
PLANNER = Qwen25VLPlanner.from_files(image=IMAGE, video=VIDEO)


def plan(header: MediaHeader):  # noqa: ANN201
    return PLANNER.plan(header, MediaOptions(), param="p")


def test_200_image_sizes() -> None:
    reference = Qwen2VLImageProcessorPil(**IMAGE)
    draw = random.Random(7)
    refused = 0
    for index in range(200):
        top = (60, 600, 6000)[index % 3]
        height, width = draw.randint(1, top), draw.randint(1, top)
        header = MediaHeader(Modality.IMAGE, "image/png", height, width)
        try:
            patches = reference.get_number_of_image_patches(height, width, {})
        except ValueError:
            with pytest.raises(InvalidRequest):
                plan(header)
            refused += 1
            continue
        layout = plan(header)
        assert layout.grids[0].patches == patches, (height, width)
        assert layout.num_rows == patches // 4
    assert refused < 20


@pytest.mark.filterwarnings("ignore")
def test_50_clips() -> None:
    """The reference is given the frames already chosen: grids and seconds per grid are equal."""
    reference = Qwen2VLVideoProcessor(**VIDEO, do_sample_frames=False)
    draw = random.Random(11)
    for _ in range(50):
        frames, fps = draw.randint(1, 40), draw.choice([1, 2, 4, 12.5, 30])
        height, width = draw.randint(20, 160), draw.randint(20, 160)
        times = tuple(i / fps for i in range(frames))
        layout = plan(MediaHeader(Modality.VIDEO, "video/mp4", height, width, times, frames / fps))
        sampled = torch.zeros(len(layout.frame_indices), 3, height, width, dtype=torch.uint8)
        distinct = sorted(set(layout.frame_indices))
        metadata = VideoMetadata(
            total_num_frames=frames, fps=fps, duration=frames / fps, frames_indices=distinct
        )
        found = reference(
            videos=[sampled], do_sample_frames=False, do_normalize=False, do_rescale=False,
            return_tensors="pt",
        )  # fmt: skip
        (grid,) = found["video_grid_thw"].tolist()
        assert [layout.grids[0].t, layout.grids[0].h, layout.grids[0].w] == grid
        assert layout.num_rows == found["pixel_values_videos"].shape[0] // 4
        assert layout.seconds_per_grid == pytest.approx(2 / metadata.sampled_fps)
