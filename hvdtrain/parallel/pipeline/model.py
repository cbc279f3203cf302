"""A Keras model whose layers are split into the stages of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras import sharded_models
from hvdtrain.keras.optimizer import DistributedOptimizer, configure_compiled_model
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.sharded_models import check_called_alike
from hvdtrain.parallel.mesh import Mesh, active_mesh
from hvdtrain.parallel.pipeline import batches, full_model, schedules, stage
from hvdtrain.parallel.pipeline.execution import Execution, make_links
from hvdtrain.parallel.pipeline.schedules import Operation
from hvdtrain.sharding.full_values import FullVariable
from hvdtrain.sharding.layer_checks import check_scores
from hvdtrain.sharding.shards import set_stages


class PipelineModel(keras.Model):
    """A full model, of which each rank of a pipeline holds the layers of one stage.

        with parallel.Mesh(pipeline=2) as mesh:
            model = parallel.PipelineModel(make_model, stages=["dense_3"])
        model.compile("adam", "mse")
        model.fit(x, y, shuffle=False)

    A batch is split into micro-batches, on which the stages work at the same time. A
    training step computes what a step of the full model on the whole batch computes:
    losses are means over its samples, gradients are summed over micro-batches and
    applied once, and `global_clipnorm` and loss scaling span all stages. Losses,
    metrics and predictions are equal on all ranks of the pipeline. `fit`, `evaluate`,
    `predict` and the model's call are collectives of these ranks, which must pass the
    same samples: with `shuffle` they need equal seeds (`keras.utils.set_random_seed`).
    If the first samples of a step differ, all ranks raise an error. The call has no
    gradient.

    `weights` and the optimizer's slots are of this rank's stage. The initial values are
    copied from `model`; delete it to release the other stages. Dropout draws a mask for
    each micro-batch: other masks than for the whole batch. Losses of `add_loss` must be
    means over the samples, or independent of them.

    With replicas of the pipeline, gradients are reduced over `mesh.data`:
    `hvd.DistributedOptimizer(optimizer, mesh=mesh)`, which `compile` adds where it is
    missing.

    Args:
        model: a built `keras.Sequential` or functional model with one input and one
            output, or a function without arguments that returns it; the same, with the
            same values, on all ranks. The weights of a model that the function returns
            are in the memory of the host, not of a GPU, until the stage is copied.
        stages: names of the first layer of each stage but the first; or the number of
            layers of each stage. By default, the largest stage has as few parameters
            as possible.
        microbatches: number of micro-batches of a batch. The first ones have a sample
            more where it is not divisible.
        schedule: `gpipe` or `1f1b`, see `schedules.training`.
        mesh: the `Mesh`; by default the active one.
        name: name of this model.

    Attributes:
        full_model: the `FullModel`, from which `model` can be built, without values.

    Raises:
        ValueError: the model cannot be split, for the reason given.
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model],
        stages: Sequence[str] | Sequence[int] | None = None,
        *,
        microbatches: int = 4,
        schedule: str = "gpipe",
        mesh: Mesh | None = None,
        name: str | None = None,
    ) -> None:
        mesh = mesh or active_mesh()
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(
                f"Received microbatches={microbatches!r}; expected a positive integer."
            )
        index, size = mesh.pipeline.index, mesh.pipeline.size
        training = schedules.training(schedule, size, microbatches)
        if callable(model) and not isinstance(model, keras.layers.Layer):
            # On the host: a GPU may have room for one stage only.
            with tf.device("CPU"):
                model = model()
        built = stage.build(model, stages, mesh)
        # No autocast: the full model casts in its layers only.
        super().__init__(name=name, dtype=model.dtype_policy, autocast=False)
        self._mesh = mesh
        self._microbatches = microbatches
        self._training = tuple(training[index])
        self._inference = tuple(schedules.inference(size, microbatches)[index])
        self._links = make_links(mesh, built.cuts)
        self._last_cut = built.cuts[-1]
        self._full_outputs = built.outputs
        self._is_last = index == size - 1
        self.network = built.network
        self.full_model = built.full_model
        self.built = True
        if size > 1:
            for variable in self.network.variables:
                set_stages(variable, mesh.pipeline.process_set)

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "rmsprop",
        loss: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Configure the training, as `keras.Model.compile` does.

        Raises:
            ValueError: for a loss that is no mean over the samples, or an optimizer
                that is distributed without the mesh.
        """
        for output_loss in keras.tree.flatten(loss):
            batches.check_loss(keras.losses.get(output_loss))
        optimizer = self._distribute(keras.optimizers.get(optimizer))
        super().compile(optimizer, loss, *args, **kwargs)
        check_scores(self, self._full_outputs)
        configure_compiled_model(self)

    def _distribute(
        self, optimizer: keras.optimizers.Optimizer
    ) -> keras.optimizers.Optimizer:
        hook = get_hook(optimizer)
        if hook is None:
            return DistributedOptimizer(optimizer, mesh=self._mesh)
        if hook.mesh is None or hook.mesh.shape != self._mesh.shape:
            raise ValueError(
                "The stages of a pipeline need an optimizer that is distributed over "
                f"their mesh, {self._mesh.shape}. Received: one for "
                f"{hook.mesh and hook.mesh.shape}. Pass "
                "hvd.DistributedOptimizer(optimizer, mesh=mesh)."
            )
        return optimizer

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Return the outputs of the last stage, on all ranks."""
        step = self._execute(
            inputs, operations=self._inference, training=training, is_scored=False
        )
        ranks = self._mesh.pipeline.process_set
        outputs = self._predictions(step)
        if not needs_communication(ranks):
            return outputs
        if not self._is_last:
            size = tf.shape(inputs)[0]
            outputs = tf.zeros((size, *self._last_cut.shape[1:]), self._last_cut.dtype)
        outputs = transport.broadcast(
            outputs, list(ranks.ranks)[-1], name="Outputs", process_set=ranks
        )
        outputs.set_shape(self._last_cut.shape)
        return outputs

    def full_variables(self, variables: Sequence[keras.Variable]) -> list[FullVariable]:
        """Return variables of all stages, in the order of the full model.

        A collective of the ranks of the pipeline. `variables` are this rank's weights,
        or variables of its optimizer.
        """
        described = full_model.describe(self, variables, self._mesh.pipeline)
        return list(described.values())

    def gather_full(self) -> keras.Model | None:
        """Return the full model and its optimizer's state on rank 0, None elsewhere.

        A collective of all ranks of the job. `save` and `save_weights` write it.

        Raises:
            SharedJobError: on all ranks, if rank 0 cannot make it.
        """
        return full_model.gather(self, self._mesh.pipeline)

    def load_weights(self, filepath: str, **options: Any) -> None:
        """Load from a file of the full model, which rank 0 reads.

        A collective of all ranks of the job. As Keras does, it leaves the optimizer
        unchanged if the file has another number of optimizer variables, or none.

        Raises:
            JobError: on all ranks, if it cannot be read.
        """
        if needs_communication(global_process_set):
            check_called_alike("load_weights")
        full_model.load(self, self._mesh.pipeline, filepath, options)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        step = self._execute(
            x,
            y,
            sample_weight,
            operations=self._training,
            training=True,
            variables=self.trainable_variables,
            scale_loss=self.optimizer.scale_loss,
        )
        self.optimizer.apply(step.gradients, self.trainable_variables)
        return self._logs(step, x, y, sample_weight)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        step = self._execute(
            x, y, sample_weight, operations=self._inference, training=False
        )
        return self._logs(step, x, y, sample_weight)

    def _execute(
        self,
        x: tf.Tensor,
        y: tf.Tensor | None = None,
        sample_weight: tf.Tensor | None = None,
        *,
        operations: Sequence[Operation],
        training: bool,
        is_scored: bool = True,
        **options: Any,
    ) -> Execution:
        """Return an `Execution` that has been run."""
        size = batches.count_samples(x)
        sizes = batches.split_sizes(size, self._microbatches)
        y, sample_weight = (batches.split(z, sizes) for z in (y, sample_weight))

        def forward(m: int, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
            outputs = self.network(inputs, training=training)
            losses = self.losses if is_scored else []
            if self._is_last and is_scored:
                losses = [
                    self.compute_loss(
                        None, y[m], outputs, sample_weight[m], training=training
                    )
                ]
            return outputs, batches.weight_loss(losses, sizes[m], size)

        index = self._mesh.pipeline.index
        inputs = None if index else batches.split(x, sizes)
        return Execution(
            forward, inputs, stage=index, links=self._links, **options
        ).run(operations)

    def _logs(
        self,
        step: Execution,
        x: tf.Tensor,
        y: tf.Tensor | None,
        sample_weight: tf.Tensor | None,
    ) -> dict[str, Any]:
        """Update the metrics on the last stage, and return them on all stages."""
        outputs, pipeline = self._predictions(step), self._mesh.pipeline
        numbers = sharded_models.fingerprints((x, y), pipeline)
        if not self._is_last:
            # Update the metrics without samples: a metric creates variables in its
            # first update, which must exist on all ranks.
            y, sample_weight = keras.tree.map_structure(
                lambda z: None if z is None else z[:0], (y, sample_weight)
            )
        self.compute_metrics(x, y, outputs, sample_weight)
        tracker = {id(variable) for variable in self._loss_tracker.variables}
        states = [v for v in self.metrics_variables if id(v) not in tracker]
        values = [tf.convert_to_tensor(state) for state in states]
        if not self._is_last:
            values = list(map(tf.zeros_like, values))
        loss = tf.add_n(step.losses or [tf.zeros([])])
        if needs_communication(pipeline.process_set):
            reduction = Reduction(op=Sum, process_set=pipeline.process_set)
            loss, numbers, *values = transport.allreduce(
                [loss, numbers, *values], reduction, name="Metrics"
            )
            sharded_models.check_equal(numbers)
            for state, value in zip(states, values, strict=True):
                state.assign(value)
        self._loss_tracker.update_state(loss, sample_weight=batches.count_samples(x))
        return self.get_metrics_result()

    def _predictions(self, step: Execution) -> tf.Tensor:
        """Return the outputs of a batch; no rows on other stages than the last."""
        if self._is_last:
            outputs = [step.outputs[m] for m in range(self._microbatches)]
            return tf.concat(outputs, axis=0)
        return tf.zeros((0, *self._last_cut.shape[1:]), self._last_cut.dtype)
