"""Many embedding tables over the ranks, against dense layers in one process."""

import keras
import meshes
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.parallel import dist_model_parallel as dmp
from hvdtrain.sharding.shards import get_sharding

ranks, four_ranks = pytest.mark.ranks, pytest.mark.four_ranks
RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 4
SHAPES = [(13, 4), (3, 2), (17, 5), (29, 7)]
# Of the tables one is whole on all ranks, one divided by row, one by column, and one
# whole on one rank; the third input shares the table of the first.
OPTIONS = {
    "data_parallel_threshold": 6,
    "row_slice_threshold": 29 * 7,
    "column_slice_threshold": 60,
    "input_table_map": [0, 1, 0, 2, 3],
}


def tables(combiner=None, embedding=keras.layers.Embedding):
    keras.utils.set_random_seed(3)
    return [
        dmp.Embedding(*shape, combiner=combiner) if combiner else embedding(*shape)
        for shape in SHAPES
    ]


def inputs_of(rank, ragged=False):
    """Ids for five inputs, which repeat; ranks have different numbers of samples."""
    rng = np.random.default_rng(rank)
    batch = rank + 1
    for table in OPTIONS["input_table_map"]:
        lengths = rng.integers(0, 4, batch) if ragged else np.full(batch, 3)
        ids = rng.integers(0, SHAPES[table][0], lengths.sum())
        found = tf.RaggedTensor.from_row_lengths(ids, lengths)
        yield found if ragged else found.to_tensor(shape=[batch, 3])


def gradients(call, inputs, variables):
    with tf.GradientTape() as tape:
        outputs = call(inputs)
        loss = tf.add_n([tf.reduce_sum(tf.sin(3 * out) * out) for out in outputs])
    return outputs, tape.gradient(loss, variables)


def dense_call(layers):
    def call(inputs):
        pairs = zip(OPTIONS["input_table_map"], inputs, strict=True)
        return [layers[table](ids) for table, ids in pairs]

    return call


@pytest.mark.parametrize(
    "combiner", [None, pytest.param("mean", marks=[ranks, four_ranks])]
)
def test_outputs_and_gradients_are_those_of_the_dense_tables(combiner):
    dense = tables(combiner)
    layer = dmp.DistributedEmbedding(tables(combiner), **OPTIONS)
    layer.build()
    kinds = [p and (p.axis, p.sizes.count(0)) for p in layer.placements]
    assert kinds == [(0, SIZE - 1), None, (1, SIZE - 2), (0, 0)]
    ragged = combiner is not None
    inputs = [list(inputs_of(rank, ragged)) for rank in range(SIZE)]
    found, by_table = gradients(layer, inputs[RANK], layer.trainable_variables)
    call = dense_call(dense)
    call(inputs[0])
    variables = [table.embeddings for table in dense]
    expected = [gradients(call, each, variables) for each in inputs]
    for output, wanted in zip(found, expected[RANK][0], strict=True):
        np.testing.assert_allclose(output, wanted, atol=1e-6)
    for i, (table, gradient) in enumerate(zip(layer.tables, by_table, strict=True)):
        np.testing.assert_array_equal(
            table.embeddings, slice_of(table.embeddings, dense[i].embeddings.numpy())
        )
        assert isinstance(gradient, tf.IndexedSlices)
        if get_sharding(table.embeddings):
            each = [tf.convert_to_tensor(of_rank[i]) for _, of_rank in expected]
            total = slice_of(table.embeddings, sum(each))
            np.testing.assert_allclose(tf.convert_to_tensor(gradient), total, atol=1e-5)


def slice_of(variable, dense):
    sharding = get_sharding(variable)
    return sharding.shard(dense) if sharding else dense


def test_one_step_after_set_weights_is_that_of_the_dense_tables(tmp_path):
    rng = np.random.default_rng(5)
    weights = [rng.normal(size=shape).astype("float32") for shape in SHAPES]
    inputs = [list(inputs_of(rank)) for rank in range(SIZE)]
    dense = tables()
    call = dense_call(dense)
    call(inputs[0])
    for table, weight in zip(dense, weights, strict=True):
        table.set_weights([weight])
    variables = [table.embeddings for table in dense]
    everyone = [gradients(call, each, variables)[1] for each in inputs]
    means = [
        tf.add_n(list(map(tf.convert_to_tensor, g))) / SIZE
        for g in zip(*everyone, strict=True)
    ]
    keras.optimizers.SGD(0.5).apply(means, variables)

    layer = dmp.DistributedEmbedding(tables(), "memory_balanced", **OPTIONS)
    layer.build()
    files = [tmp_path / f"{i}.npy" for i in range(len(weights))]
    for file, weight in zip(files, weights, strict=True):
        np.save(file, weight)
    layer.set_weights([*weights[:2], *files[2:]])
    dmp.broadcast_variables(layer.variables, root_rank=0)
    variables = layer.trainable_variables
    with dmp.DistributedGradientTape(tf.GradientTape()) as tape:
        outputs = layer(inputs[RANK])
        loss = tf.add_n([tf.reduce_sum(tf.sin(3 * out) * out) for out in outputs])
    keras.optimizers.SGD(0.5).apply(tape.gradient(loss, variables), variables)
    found = layer.get_weights(all_ranks=True)
    for wanted, table in zip(dense, found, strict=True):
        np.testing.assert_allclose(table, wanted.embeddings, atol=1e-6)
    assert len(layer.get_weights()) == (len(SHAPES) if RANK == 0 else 0)


def model(embedding, optimizer):
    inputs = [keras.Input((3,), dtype="int32") for _ in OPTIONS["input_table_map"]]
    outputs = [keras.layers.Flatten()(each) for each in embedding(inputs)]
    outputs = keras.layers.Dense(3, "softmax")(keras.layers.Concatenate()(outputs))
    network = keras.Model(inputs, outputs)
    network.compile(optimizer, oracle.LOSS)
    return network


@pytest.mark.parametrize(
    ("twin", "optimizer"),
    [
        # Gradients of rows: the test of outputs and gradients.
        pytest.param(
            *(keras.layers.Embedding, lambda: keras.optimizers.SGD(0.5)),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *(meshes.Summing, lambda: keras.optimizers.Adam(0.02)),
            marks=[ranks, four_ranks],
        ),
    ],
)
def test_fit_equals_the_dense_tables_with_the_big_batch(twin, optimizer):
    steps = 10
    rng = np.random.default_rng(7)
    samples = steps * BATCH * SIZE
    x = [
        rng.integers(0, SHAPES[table][0], (samples, 3))
        for table in OPTIONS["input_table_map"]
    ]
    y = rng.integers(0, 3, samples)
    layers = tables(embedding=twin)
    dense = model(dense_call(layers), optimizer())
    expected = oracle.fit(dense, x, y, BATCH * SIZE)
    embedding = parallel.DistributedEmbedding(tables(), **OPTIONS)
    divided = model(embedding, hvd.DistributedOptimizer(optimizer()))
    found = oracle.fit(
        divided,
        [oracle.shard(each) for each in x],
        oracle.shard(y),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        batch_size=BATCH,
    )
    np.testing.assert_allclose(
        found.history["loss"], expected.history["loss"], rtol=1e-5
    )
    weights = [*embedding.get_weights(all_ranks=True), *divided.weights[-2:]]
    wanted = [*(table.embeddings for table in layers), *dense.weights[-2:]]
    for weight, of_dense in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(weight, of_dense, atol=2e-6)


def test_a_saved_model_has_the_dense_tables(tmp_path):
    def make(scale):
        inputs = [keras.Input((3,), dtype="int32") for _ in OPTIONS["input_table_map"]]
        embedding = dmp.DistributedEmbedding(tables("sum"), **OPTIONS)
        made = keras.Model(inputs, embedding(inputs))
        # A plain optimizer, as with a tape.
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        made.optimizer.build(made.trainable_variables)
        for weight in made.trainable_variables:
            weight.assign(scale * weight)
        return made, embedding

    (network, embedding), (again, _) = make(1), make(2)
    weights = network.trainable_variables
    network.optimizer.apply([tf.ones(weight.shape) for weight in weights], weights)
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), name="path")
    network.save(path)
    ids = [tf.convert_to_tensor(each) for each in inputs_of(RANK)]
    loaded = keras.models.load_model(path)
    dense = zip(loaded.weights, embedding.get_weights(all_ranks=True), strict=True)
    pairs = [*dense, *zip(loaded(ids), network(ids), strict=True)]
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted)
    # A rank has all of it.
    if RANK == 0:
        loaded.predict(ids, verbose=0)
    again.load_weights(path)
    oracle.assert_same_state(again, network)


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_tables_take_the_ids_of_all_ranks(combiner):
    options = {"dp_input": False, "column_slice_threshold": 60}
    layer = dmp.DistributedEmbedding(tables(combiner), **options)
    layer.build()
    assert sorted({i for mine in layer.input_ids_list for i in mine}) == [0, 1, 2, 3]
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, rows, (SIZE * BATCH, 3)) for rows, _ in SHAPES]
    mine = [tf.constant(ids[i]) for i in layer.input_ids_list[RANK]]
    found, by_table = gradients(layer, mine, layer.trainable_variables)
    dense = tables(combiner)
    everything = list(map(tf.constant, ids))

    def call(inputs):
        return [table(each) for table, each in zip(dense, inputs, strict=True)]

    call(everything)
    variables = [table.embeddings for table in dense]
    wanted, wanted_gradients = gradients(call, everything, variables)
    rows = slice(RANK * BATCH, (RANK + 1) * BATCH)
    for output, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(output, expected[rows], atol=1e-6)
    for table, gradient, expected in zip(
        layer.tables, by_table, wanted_gradients, strict=True
    ):
        expected = slice_of(table.embeddings, tf.convert_to_tensor(expected))
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda call: call, tf.function])
def test_samples_that_are_no_multiple_of_the_ranks(wrap):
    layer = dmp.DistributedEmbedding(tables(), dp_input=False)
    layer.build()
    # The ids could be divided, within a sample. On rank 0 alone the samples as well.
    samples = SIZE if RANK == 0 else SIZE + 1
    mine = [tf.zeros([samples, SIZE], tf.int64) for _ in layer.input_ids_list[RANK]]
    message = f"a multiple of {SIZE} ranks. Received samples:"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        wrap(layer)(mine)


@pytest.mark.parametrize("rows", [0, None])
def test_a_combination_of_no_ids_is_zero(rows):
    @tf.function(input_signature=[tf.TensorSpec([3, rows], tf.int64)])
    def look_up(ids):
        return layer([ids])[0], table(ids)

    keras.utils.set_random_seed(3)
    layer = dmp.DistributedEmbedding([dmp.Embedding(9, 2, combiner="mean")])
    table = dmp.Embedding(9, 2, combiner="mean")
    for found in look_up(tf.zeros([3, 0], tf.int64)):
        np.testing.assert_array_equal(found, np.zeros((3, 2)))


@pytest.mark.release
def test_inputs_of_one_table_are_one_gradient_of_it():
    layer = dmp.DistributedEmbedding(
        tables(), dp_input=False, input_table_map=OPTIONS["input_table_map"]
    )
    layer.build()
    dense = tables(embedding=meshes.Summing)
    rng = np.random.default_rng(5)
    numbers = OPTIONS["input_table_map"]
    shape = SIZE * BATCH, 3
    ids = [tf.constant(rng.integers(0, SHAPES[i][0], shape)) for i in numbers]
    adam = keras.optimizers.Adam
    dense_call(dense)(ids)
    variables = [table.embeddings for table in dense]
    _, wanted = gradients(dense_call(dense), ids, variables)
    # The mean over ranks, as that of their losses.
    adam(0.1).apply([gradient / SIZE for gradient in wanted], variables)
    optimizer = hvd.DistributedOptimizer(adam(0.1))

    @tf.function
    def step():
        mine = [ids[i] for i in layer.input_ids_list[RANK]]
        _, by_table = gradients(layer, mine, layer.trainable_variables)
        optimizer.apply(by_table, layer.trainable_variables)

    step()
    found = layer.get_weights(all_ranks=True)
    for table, weights in zip(dense, found, strict=True):
        np.testing.assert_allclose(weights, table.embeddings, atol=1e-5)


def test_an_id_out_of_range_on_one_rank_fails_on_all():
    layer = dmp.DistributedEmbedding(tables(), dp_input=False)
    for wrong in (False, True):
        mine = layer.input_ids_list[RANK]
        ids = [np.zeros([SIZE * BATCH, 1], "int64") for _ in mine]
        if not wrong:
            layer(ids)
            continue
        ids[0][2] = 999 if RANK == 0 else 0
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"out of range[\s\S]*999"
        ):
            layer(ids)


def test_wrong_arguments_are_refused():
    for arguments, message in [
        ({"strategy": "best"}, "strategy must be one of basic"),
        ({"input_table_map": [4]}, "numbers of 4 tables"),
        ({"embeddings": [keras.layers.Dense(1)]}, "must be keras.layers.Embedding"),
    ]:
        with pytest.raises(ValueError, match=message):
            dmp.DistributedEmbedding(**{"embeddings": tables(), **arguments})
