"""Pipelines: models whose layers are split into stages, each on its own ranks."""

from hvdtrain.parallel.pipeline.model import PipelineModel
