# SPDX-License-Identifier: Apache-2.0
"""Operators do not depend on ranks, layouts, scopes and cuts, nor on what is in memory before a call."""

import itertools

import numpy as np
import pytest

import cpx
from ranks import batches, shard, shardings, whole, worlds

recurrences = {
    "gated_delta_rule": (cpx.gated_delta_rule, cpx.gated_delta_rule_backward),
    "kimi_delta_attention": (cpx.kimi_delta_attention, cpx.kimi_delta_attention_backward),
    "head_decay_attention": (cpx.head_decay_attention, cpx.head_decay_attention_backward),
    "channel_decay_attention": (cpx.channel_decay_attention, cpx.channel_decay_attention_backward),
}
heads = cpx.Heads(2, 4, 6, 5)
chunk = 4


def inputs_of(name, tokens, dtype=np.float64):
    random = np.random.default_rng(tokens)
    q, k = random.normal(size=(2, tokens, heads.key_heads, heads.key_dim))
    v = random.normal(size=(tokens, heads.value_heads, heads.value_dim))
    wide = name in ("kimi_delta_attention", "channel_decay_attention")
    g = -random.random((tokens, heads.value_heads, heads.key_dim) if wide else (tokens, heads.value_heads))
    beta = random.random((tokens, heads.value_heads))
    delta = name in ("gated_delta_rule", "kimi_delta_attention")
    if not delta:
        k /= heads.key_dim
    return [x.astype(dtype) for x in (q, k, v, g) + ((beta,) if delta else ())], random.normal(size=v.shape).astype(
        dtype
    )


def recur(name, sharding, how, inputs, dout):
    """Returns o, the gradients, the final states and the gradients of the initial ones, whole."""
    forward, backward = recurrences[name]
    sequences, width = sharding.batch.sequences, heads.value_heads * heads.key_dim * heads.value_dim
    initial = np.random.default_rng(1).normal(size=(sequences, width)).astype(dout.dtype)

    def program(comm):
        plan = cpx.carry(sharding, comm.rank, how)
        x = [shard(sharding, comm.rank, a) for a in inputs]
        saved = cpx.saved_states(plan, x[0], heads, name)
        final, dinitial = np.zeros_like(initial), np.zeros_like(initial)
        for a in saved:
            a.fill(np.nan)
        o = forward(
            plan, *x, comm, chunk=chunk, initial=initial, final=final, saved=saved, out=np.full_like(x[2], np.nan)
        )
        gradients = backward(
            plan,
            *x,
            shard(sharding, comm.rank, dout),
            saved,
            comm,
            chunk=chunk,
            dfinal=initial,
            dinitial=dinitial,
            out=[np.full_like(a, np.nan) for a in x],
        )
        return o, *gradients, final, dinitial

    parts = list(zip(*cpx.run(sharding.ranks, program)))
    sums = [np.sum(part, axis=0) for part in parts[-2:]]  # each is written on one rank
    return [whole(sharding, part) for part in parts[:-2]] + sums


@pytest.mark.parametrize("name", recurrences)
@pytest.mark.parametrize("batch", batches[1:], ids=str)
def test_a_recurrence_is_that_of_one_rank(name, batch):
    inputs, dout = inputs_of(name, batch.tokens)
    one = recur(name, cpx.shard(batch, cpx.sequential(1)), "serial", inputs, dout)
    for ranks, (i, how) in itertools.product((2, 3, 5), itertools.product(range(0, 20, 3), ("scan", "serial"))):
        sharding = shardings(ranks, batch)[(i + ranks) % 20]
        several = recur(name, sharding, how, inputs, dout)
        exact = sharding.is_exact(how, chunk)
        assert exact == (how == "serial" and "aligned" in repr(sharding))
        for a, b in zip(one, several):
            if exact:
                assert np.array_equal(a, b), sharding
            else:
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10, err_msg=f"{sharding} {how}")


def test_a_recurrence_by_heads_is_that_of_one_rank():
    batch = cpx.thd([0, 7, 20])
    inputs, dout = inputs_of("gated_delta_rule", 20)
    one = recur("gated_delta_rule", cpx.shard(batch, cpx.sequential(1)), "serial", inputs, dout)
    key, value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    sharding = cpx.head_sharded(2, batch, [key, key, value, (heads.value_heads, 1), (heads.value_heads, 1)])

    def columns(rank, x, count):
        first, last = sharding.heads(rank, count)
        return np.ascontiguousarray(x[:, first:last])

    def program(comm):
        plan = cpx.carry(sharding, comm.rank)
        counts = [2, 2, 4, 4, 4]
        x = [columns(comm.rank, a, n) for a, n in zip(inputs, counts)]
        saved = cpx.saved_states(plan, x[0], heads)
        initial = np.random.default_rng(1).normal(size=(2, 4, 6, 5))[:, slice(*sharding.heads(comm.rank, 4))]
        initial = np.ascontiguousarray(initial)
        o = cpx.gated_delta_rule(plan, *x, comm, heads=heads, chunk=chunk, initial=initial, saved=saved)
        gradients = cpx.gated_delta_rule_backward(
            plan, *x, columns(comm.rank, dout, 4), saved, comm, heads=heads, chunk=chunk, dfinal=initial
        )
        return o, *gradients

    for a, parts in zip(one, zip(*cpx.run(2, program))):
        assert np.array_equal(a, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", worlds)
def test_a_convolution_is_bitwise_that_of_one_rank(ranks, dtype):
    taps, channels = 4, 6
    for batch in batches:
        random = np.random.default_rng(ranks)
        x, dy = random.normal(size=(2, batch.tokens, channels)).astype(dtype)
        weight, bias = random.normal(size=(channels, taps)).astype(dtype), random.normal(size=channels).astype(dtype)

        def convolve(sharding):
            def program(comm):
                before = cpx.halo(sharding, comm.rank, taps - 1)
                after = cpx.halo(sharding, comm.rank, taps - 1, "after")
                own, of_y = shard(sharding, comm.rank, x), shard(sharding, comm.rank, dy)
                y = cpx.causal_conv1d(before, own, weight, comm, bias, "silu", out=np.full_like(own, np.nan))
                dx, dweight, dbias = cpx.causal_conv1d_backward(
                    before, after, own, weight, of_y, comm, bias, "silu", order="by_row"
                )
                cpx.sum_over_ranks(dweight, comm)
                cpx.sum_over_ranks(dbias, comm)
                return y, dx, dweight, dbias

            parts = list(zip(*cpx.run(sharding.ranks, program)))
            for part in parts[2:]:
                assert all(np.array_equal(part[0], other) for other in part)
            return [whole(sharding, part) for part in parts[:2]] + [part[0] for part in parts[2:]]

        one = convolve(cpx.shard(batch, cpx.sequential(1)))
        for sharding in shardings(ranks, batch)[ranks % 4 :: 4]:
            for a, b in zip(one, convolve(sharding)):
                assert np.array_equal(a, b), sharding


def test_a_convolution_in_two_batches_is_that_of_one():
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(13, 3)), random.normal(size=(3, 4))

    def convolve(first, last, initial, final):
        s = cpx.shard(cpx.thd([0, last - first]), cpx.zigzag(2))

        def program(comm):
            own = shard(s, comm.rank, x[first:last])
            return cpx.causal_conv1d(
                cpx.halo(s, comm.rank, 3), own, weight, comm, initial=initial, final=final if comm.rank == 0 else None
            )

        return whole(s, cpx.run(2, program))

    state = np.zeros((1, 12))  # of zigzag, rank 0 has the end of the sequence
    parts = [convolve(0, 6, None, state), convolve(6, 13, state.copy(), None)]
    assert np.array_equal(np.concatenate(parts), convolve(0, 13, None, None))


def test_rotary_does_not_depend_on_the_sharding():
    batch = cpx.thd([0, 5, 5, 6, 33, 40])
    x = np.random.default_rng(0).normal(size=(40, 3, 8)).astype(np.float32)
    frequencies = cpx.rotary_frequencies(10000.0, 6)

    def turn(sharding):
        def program(comm):
            own, at = shard(sharding, comm.rank, x), sharding.positions(comm.rank)
            y = cpx.rotary(own, at, 8, frequencies)
            back = cpx.rotary_backward(y, at, 8, frequencies)
            np.testing.assert_allclose(back, own, atol=1e-5)
            return y

        return whole(sharding, cpx.run(sharding.ranks, program))

    one = turn(cpx.shard(batch, cpx.sequential(1)))
    angle = np.float32(4) * frequencies[1]  # token 4 of sequence 0, pair 1
    expected = x[4, :, 1] * np.cos(angle) - x[4, :, 4] * np.sin(angle)
    np.testing.assert_allclose(one[4, :, 1], expected, atol=1e-6)
    for ranks in (2, 3, 8):
        for sharding in shardings(ranks, batch):
            assert np.array_equal(one, turn(sharding))


def test_attention_does_not_depend_on_the_sharding():
    batch = cpx.thd([0, 7, 7, 20])
    random = np.random.default_rng(0)
    q, do = random.normal(size=(2, 20, 4, 6))
    k, v = random.normal(size=(2, 20, 2, 6))
    of = cpx.AttentionHeads(4, 2, 6)

    def attend(sharding):
        keys = cpx.replicated(sharding.ranks, batch)

        def program(comm):
            there = cpx.relayout(sharding, keys, comm.rank)
            own = [shard(sharding, comm.rank, a) for a in (q, k, v, do)]
            all_k, all_v = (cpx.exchange(there, a, comm) for a in own[1:3])
            lse = np.full((len(own[0]), 4), np.nan)
            o = cpx.attention(sharding, keys, comm.rank, own[0], all_k, all_v, of, lse=lse)
            dq, dk, dv = cpx.attention_backward(sharding, keys, own[0], all_k, all_v, o, own[3], lse, of, comm)
            return o, dq, *(cpx.exchange(there.transposed(), a, comm) for a in (dk, dv))

        return [whole(sharding, part) for part in zip(*cpx.run(sharding.ranks, program))]

    one = attend(cpx.shard(batch, cpx.sequential(1)))
    row, head = 12, 3  # token 5 of the third sequence
    scores = np.exp(q[row, head] @ k[7:13, 1].T / np.sqrt(6))
    np.testing.assert_allclose(one[0][row, head], scores @ v[7:13, 1] / scores.sum())
    for ranks in (2, 3, 5):
        for sharding in shardings(ranks, batch)[::3]:
            several = attend(sharding)
            assert np.array_equal(one[0], several[0]) and np.array_equal(one[1], several[1])
            for a, b in zip(one[2:], several[2:]):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_loss_has_the_same_bits_on_every_sharding():
    batch = cpx.thd([0, 7, 7, 20])
    random = np.random.default_rng(0)
    tokens, logits = random.integers(0, 11, 20), random.normal(size=(20, 11))

    def loss_of(sharding):
        def program(comm):
            labels = cpx.next_token_labels(
                cpx.halo(sharding, comm.rank, 1, "after"), shard(sharding, comm.rank, tokens), comm
            )
            own = shard(sharding, comm.rank, logits)
            logp = cpx.log_probabilities(own, labels)
            loss = cpx.mean_token_loss(sharding, logp, labels, comm)
            dlogp = cpx.mean_token_loss_backward(sharding, comm.rank, loss, labels, logp)
            return loss, labels, cpx.log_probabilities_backward(own, labels, dlogp)

        losses, labels, gradients = zip(*cpx.run(sharding.ranks, program))
        assert len(set(losses)) == 1
        return losses[0], whole(sharding, labels), whole(sharding, gradients)

    one = loss_of(cpx.shard(batch, cpx.sequential(1)))
    expected = np.append(tokens[1:], 0)
    expected[[6, 19]] = cpx.ignored
    assert np.array_equal(one[1], expected) and one[0].weight == 18
    p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    kept = expected != cpx.ignored
    assert np.isclose(one[0].mean, -p[kept, expected[kept]].mean())
    for sharding in shardings(3, batch):
        several = loss_of(sharding)
        assert several[0] == one[0]
        assert all(np.array_equal(a, b) for a, b in zip(one[1:], several[1:]))


def test_experts_on_several_ranks_see_the_rows_of_one():
    batch = cpx.thd([0, 7, 20])
    random = np.random.default_rng(0)
    logits, x = random.normal(size=(20, 6)), random.normal(size=(20, 3))
    weight, dy = random.normal(size=(6, 5, 3)), random.normal(size=(20, 2, 5))

    def mix(sharding):
        def program(comm):
            own = shard(sharding, comm.rank, x)
            chosen, weights = cpx.choose_experts(shard(sharding, comm.rank, logits), 2)
            at = cpx.ExpertExchange(chosen, 6, sharding.global_rows(comm.rank), comm)
            first, last = at.own
            rows = at.to_experts(own)
            y = at.to_tokens(cpx.expert_linear(at.begins, rows, weight[first:last]))
            of_rows = at.to_experts(shard(sharding, comm.rank, dy).reshape(-1, 10), width=5)
            dx, dweight = cpx.expert_linear_backward(at.begins, rows, weight[first:last], of_rows)
            return y, weights, at.to_tokens(dx), dweight

        parts = list(zip(*cpx.run(sharding.ranks, program)))
        return [whole(sharding, part) for part in parts[:3]] + [np.concatenate(parts[3])]

    one = mix(cpx.shard(batch, cpx.sequential(1)))
    best = logits[4].argmax()
    np.testing.assert_allclose(one[0][4, 0], weight[best] @ x[4])
    for ranks in (2, 3):
        for sharding in shardings(ranks, batch)[::4]:
            assert all(np.array_equal(a, b) for a, b in zip(one, mix(sharding)))


def test_choices_have_the_gradients_of_their_formula():
    logits = np.random.default_rng(0).normal(size=(3, 5))
    chosen, weights = cpx.choose_experts(logits, 2)
    assert np.array_equal(cpx.weigh_experts(logits, chosen), weights)
    dweights = np.random.default_rng(1).normal(size=(3, 2))
    dlogits = cpx.choose_experts_backward(logits, chosen, weights, dweights)
    for row, expert in itertools.product(range(3), range(5)):
        step = np.zeros_like(logits)
        step[row, expert] = 1e-6
        rise = cpx.weigh_experts(logits + step, chosen) - cpx.weigh_experts(logits - step, chosen)
        assert np.isclose((rise * dweights).sum() / 2e-6, dlogits[row, expert], atol=1e-8)


def test_rows_shift_between_ranks_and_back():
    batch = cpx.thd([0, 7, 7, 20])
    x = np.random.default_rng(0).normal(size=(20, 2))

    def shift(sharding, reach, side):
        def program(comm):
            plan = cpx.halo(sharding, comm.rank, reach, side)
            return cpx.shift_rows(plan, shard(sharding, comm.rank, x), comm, fill=-1)

        return whole(sharding, cpx.run(sharding.ranks, program))

    for sharding in shardings(3, batch):
        ahead = shift(sharding, 2, "after")
        assert np.array_equal(ahead[:5], x[2:7]) and (ahead[5:7] == -1).all()
        assert np.array_equal(shift(sharding, 2, "before")[9:20], x[7:18])


@pytest.mark.parametrize("fill", [2**53 + 1, -(2**63), 2**63 - 1, -100.0])
def test_rows_without_another_are_filled_with_an_integer_as_it_is(fill):
    plan = cpx.halo(cpx.shard(batches[2], cpx.zigzag(1)), 0, 1, "after")
    shifted = cpx.shift_rows(plan, np.zeros((20, 1), np.int64), cpx.threads(1)[0], fill)
    assert shifted[[6, 19], 0].tolist() == [int(fill)] * 2 and not shifted[:6].any()


@pytest.mark.parametrize("name", recurrences)
def test_a_scale_of_nothing_is_nothing(name):
    forward, backward = recurrences[name]
    plan = cpx.carry(cpx.shard(batches[2], cpx.zigzag(1)), 0)
    (inputs, dout), comm = inputs_of(name, 20), cpx.threads(1)[0]
    saved = cpx.saved_states(plan, inputs[0], heads, name)
    assert forward(plan, *inputs, comm).any()
    assert not forward(plan, *inputs, comm, scale=0.0, saved=saved).any()
    assert not backward(plan, *inputs, dout, saved, comm, scale=0.0)[2].any()


def test_sums_are_in_rank_order():
    values = [np.float32(v) for v in (1e8, 1.0, -1e8, 1.0)]

    def program(comm):
        return cpx.sum_over_ranks(np.full(5, values[comm.rank]), comm)

    expected = ((values[0] + values[1]) + values[2]) + values[3]
    for summed in cpx.run(4, program):
        assert (summed == expected).all()


def test_a_movement_takes_other_batches():
    def program(comm):
        of = [cpx.thd([0, 7, 20]), cpx.thd([0, 11]), cpx.thd([0, 1, 2, 20])]
        pairs = [(cpx.shard(b, cpx.zigzag(3)), cpx.shard(b, cpx.sequential(3))) for b in of]
        move = cpx.Movement(*pairs[0], width=2, rows=8, sequences=3, comm=comm)
        for (source, target), b in zip(pairs, of):
            x = np.arange(2.0 * b.tokens).reshape(-1, 2)
            move.set(source, target)
            y = move(shard(source, comm.rank, x))
            assert np.array_equal(y, shard(target, comm.rank, x))
            assert np.array_equal(move.transposed(y), shard(source, comm.rank, x))
        large = cpx.thd([0, 60])
        with pytest.raises(cpx.Error, match="rows and sequences of the batch: expected at most 8, 3, got 20, 1"):
            move.set(cpx.shard(large, cpx.zigzag(3)), cpx.shard(large, cpx.sequential(3)))
        for call in (move, move.transposed):
            with pytest.raises(cpx.Error, match="movement: elements of a row: expected 2, got 3"):
                call(np.zeros((move.plan.source_rows, 3)))
        for width in (0, -2, "a", 1.5):
            with pytest.raises(cpx.Error, match="width"):
                cpx.Movement(*pairs[0], width=width, rows=8, sequences=3, comm=comm)
        for name in ("rows", "sequences"):
            with pytest.raises(cpx.Error, match=f"movement: {name}: expected a number, at least 0, got 8.5"):
                cpx.Movement(*pairs[0], comm=comm, **{"width": 2, "rows": 8, "sequences": 3, name: 8.5})

    cpx.run(3, program)


@pytest.mark.parametrize("carry", ["serial", "heads"])
def test_a_layer_is_bitwise_that_of_one_rank(carry):
    batch = cpx.thd.from_lengths([9, 0, 21])
    random = np.random.default_rng(0)
    qkv = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim
    v, hidden = heads.value_heads * heads.value_dim, 7
    shapes = [(qkv, hidden), (v, hidden), (4, hidden), (4, hidden), (qkv, 1, 4), (4,), (4,), (5,), (hidden, v)]
    weights = {name: random.normal(size=shape) for name, shape in zip(cpx.gated_delta_net.parameters, shapes)}
    x, dy = random.normal(size=(2, batch.tokens, hidden))

    def layer(sharding, way):
        def program(comm):
            net = cpx.gated_delta_net(sharding, comm.rank, hidden, heads, way, chunk=chunk)
            saved = net.new_saved()
            own = shard(sharding, comm.rank, x)
            y = net(weights, own, comm, saved=saved)
            dx, dweights = net.backward(weights, own, saved, shard(sharding, comm.rank, dy), comm, order="by_row")
            return y, dx, [cpx.sum_over_ranks(d, comm) for d in dweights.values()]

        y, dx, dweights = zip(*cpx.run(sharding.ranks, program))
        return [whole(sharding, y), whole(sharding, dx), *dweights[0]]

    one = layer(cpx.shard(batch, cpx.sequential(1)), "serial")
    for ranks in (2, 3):
        sharding = cpx.shard(batch, cpx.zigzag(ranks), cut=cpx.aligned(chunk))
        for a, b in zip(one, layer(sharding, carry)):
            assert np.array_equal(a, b)


def test_a_layer_decodes_as_it_prefills():
    random = np.random.default_rng(0)
    qkv, v, hidden = 2 * 2 * 6 + 4 * 5, 4 * 5, 7
    shapes = [(qkv, hidden), (v, hidden), (4, hidden), (4, hidden), (qkv, 4), (4,), (4,), (5,), (hidden, v)]
    weights = {name: random.normal(size=shape) for name, shape in zip(cpx.gated_delta_net.parameters, shapes)}
    x = random.normal(size=(6, hidden))
    comm = cpx.threads(1)[0]

    def run(rows, conv, recurrent):
        sharding = cpx.shard(cpx.thd([0, len(rows)]), cpx.sequential(1))
        return cpx.gated_delta_net(sharding, 0, hidden, heads)(weights, rows, comm, conv=conv, recurrent=recurrent)

    conv, recurrent = np.zeros((1, 4 * qkv)), np.zeros((1, 4 * 6 * 5))
    parts = [run(x[:4], conv, recurrent), run(x[4:5], conv, recurrent), run(x[5:], conv, recurrent)]
    np.testing.assert_allclose(np.concatenate(parts), run(x, None, None), rtol=1e-9, atol=1e-12)


def test_local_operators_have_the_gradients_of_their_formulas():
    random = np.random.default_rng(0)
    x, z, dy = random.normal(size=(3, 5, 12))
    weight, matrix = random.normal(size=4), random.normal(size=(3, 12))
    np.testing.assert_allclose(cpx.linear(x, matrix), x @ matrix.T)
    dx, dmatrix = cpx.linear_backward(x, matrix, dy[:, :3].copy())
    np.testing.assert_allclose(dx, dy[:, :3] @ matrix)
    np.testing.assert_allclose(dmatrix, dy[:, :3].T @ x)

    def check(forward, gradients, inputs):
        for x_of, gradient in zip(inputs, gradients):
            step = random.normal(size=x_of.shape)
            moved = [[x + s * 1e-6 * step if x is x_of else x for x in inputs] for s in (1, -1)]
            rise = (forward(*moved[0]) - forward(*moved[1])) * dy / 2e-6
            np.testing.assert_allclose((gradient * step).sum(), rise.sum(), rtol=1e-6)

    plain = [lambda x, w: cpx.rms_norm(x, w, 1e-5, 1.0), cpx.rms_norm_backward(x, weight, dy, 1e-5, 1.0), [x, weight]]
    gated = [lambda x, z, w: cpx.gated_rms_norm(x, z, w, 1e-5), cpx.gated_rms_norm_backward(x, z, weight, dy, 1e-5)]
    check(*plain)
    check(*gated, [x, z, weight])
