"""Attention of training steps replayed from CUDA graphs, for models whose experts are fast enough that Python, which
launches some three hundred kernels a layer for stock attention with PEFT's LoRA (forward, recomputed forward,
backward), bounds the step.

`signature` says which calls are the same, `static_buffers` holds the tensors at fixed addresses that graphs read and
write, `replay` wraps `forward` of every `self_attn`, captures and replays.

Each layer and kind of call has two graphs. The second one recomputes forward, with gradients, and goes back through it,
so it needs nothing that the first one has left. That costs one forward pass of attention, which a device that waits for
Python has time for, and it is what neither of torch's own tools can be made to do:

`torch.cuda.make_graphed_callables`
- captures backward as the second half of one forward: the activations stay in graph memory from the replay of one to
  the replay of the other. Every layer and shape would hold its own, which is what gradient checkpointing is there to
  avoid, and callables that share a pool have to run in the order of their capture. Here one set of static buffers and
  one memory pool serve all layers, shapes and orders, two forward passes before the first backward among them.
- takes positional tensors of one shape and assumes that parameters did not change since the capture. Attention is
  called with keywords (a tuple of rotary embeddings, a mask or None, flags), at varying lengths, which are padded and
  cut into pieces here; and PEFT replaces, merges, scales and switches parameters, which is part of the key here.
- differentiates with respect to the parameters themselves. Their AccumulateGrad nodes remember the streams of earlier
  passes, for which a capture cannot wait; graphs here are captured with aliases in place of the parameters.
- captures at once or raises. Here a call is captured when it came a third time and no earlier call of its kind is still
  to be recomputed: checkpointing compares the tensors that a pass saves with those of its recomputation, so both have
  to be replayed or neither. Hooks inside of a module, which a replay would skip, keep it out.

`torch.compile`
- does not compute the numbers of stock attention: Inductor fuses and rounds differently.
- guards on module state and compiles again, for seconds, when shapes or PEFT's switches change, up to a limit behind
  which it is eager; its CUDA graphs keep the activations of a forward pass for its backward as above.
"""
