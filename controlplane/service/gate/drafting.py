"""What will a job take? Its ticket, as it stands before anybody has decided about it."""

from collections.abc import Mapping

from controlplane.core.forecast import LengthForecast
from controlplane.core.memory import Footprint, generate_footprint
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Timeline
from controlplane.service.gate.intake import EmbedJob, GenerateJob
from controlplane.service.prediction.fail_open import Lengths
from controlplane.service.ticket import Ticket


def drafted(
    job: GenerateJob | EmbedJob,
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    lengths: Lengths,
) -> Ticket:
    request = job.request
    forecast: LengthForecast | None = None
    if isinstance(job, EmbedJob):
        size = embedders[request.model].batch_bytes([len(ids) for ids in job.inputs])
        # Two batches' worth are sent: one is computed while the next is made up, and takes no memory yet.
        footprint = Footprint(base=-(-size // 2), steps=max(1, request.prompt_tokens), worst=size)
    else:
        forecast = lengths.forecast(request)
        footprint = generate_footprint(
            generators[request.model].geometry,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            expected_tokens=forecast.mean,
            deviation_tokens=forecast.deviation,
            sequences=request.sequences,
        )
    return Ticket(request, footprint, forecast, Timeline(request.arrival))
