"""A model whose layers are divided into the stages of a pipeline."""

from hvdtrain.parallel.pipeline.model import PipelineModel
