# SPDX-License-Identifier: Apache-2.0
"""What trainers import today, on cpx: one module a peer, with the peer's names and signatures.

    cpx.dropin.miles         zigzag to the packed order and back, positions of zigzag rows
    cpx.dropin.fla           build_cp_context, chunk_gated_delta_rule, causal_conv1d
    cpx.dropin.megatron      the exchange of tokens for heads around a gated delta net
    cpx.dropin.twinkle       the same in twinkle's terms
    cpx.dropin.transformers  Qwen3.5 and Qwen3-VL of Hugging Face under context parallelism

Where a peer wants a group, each takes a torch.distributed.ProcessGroup or a cpx.Communicator. Tensors stay on their
device. A caller's mistake raises cpx.Error, before anything moves.
"""
