"""Words on each exhibit of the museum: where it comes from, its symptom, and what mends it."""

#: by bug: origin, symptom, the mend, or why no check sees it
TEXTS: dict[str, tuple[str, str, str]] = {
    "a phase lapped": (
        "our swap_ab over e4m3, 2026-11-20",
        "A hang, now and then. One mbarrier announced the weights of every tile. "
        "The other warp group completed it for its second tile while a reader still waited for "
        "the first: two phases had gone by, and the parity was the old one.",
        "Two mbarriers in turn (commit 0e01eee). A wait compares one bit, so the phase of a "
        "barrier may be at most one ahead of a waiter.",
    ),
    "a missing proxy fence": (
        "public: a common bug of kernels that store an operand of wgmma by themselves",
        "A wrong row, or none. Warps store P through the generic proxy; the tensor core reads it "
        "through the async proxy and may see what lay there before.",
        "fence.proxy.async between the stores and the barrier behind which the product is issued.",
    ),
    "a stage freed early": (
        "public: every ring whose consumer is asynchronous",
        "Noise, when products are late. The stage is released when PV is issued, not "
        "when it has read: the next tile's bytes land under a running product.",
        "wgmma.wait_group 0 ahead of the arrive at kv.empty.",
    ),
    "one buffer, one barrier a tile": (
        "public: mla_decode_fp16.py:2563 of NVIDIA's SM100 examples, found by this emulator",
        "Never seen on a card, where hundreds of clocks lie between; the emulator reports it in "
        "every schedule. Softmax warps exchange row maxima through one buffer with one barrier a "
        "tile: a warp that is a tile ahead overwrites what its partner has not read.",
        "Two buffers in turn, or a second barrier.",
    ),
    "a unit outside its stage": (
        "our swap_ab over 656-byte tokens, 2026-11-22, found by this emulator",
        "A tile scaled by its successor's unit. The units of a tile's scales lay in two slots by "
        "the tile's number, and the ring has three stages: two tiles further on, a slow warp "
        "group found them overwritten.",
        "The units lie with their stage, and are released with it (commit eb42e38).",
    ),
    "half the arrivals": (
        "our merge in clusters, 2026-11-22, found by this emulator",
        "Ranks that share a row pair read partials that another rank had not stored. Each waited "
        "for as many arrivals as there are splits, at a counter of its own.",
        "One counter for all CTAs that write what is read, and all of their arrivals (commit "
        "1415ba1).",
    ),
    "a flag before its data": (
        "public: split-k semaphores without a release",
        "Partials of an earlier launch in a result. The flag is stored relaxed, and "
        "may be seen before the data that it announces.",
        "st.release, or a fence before a relaxed store; ld.acquire on the other side.",
    ),
    "a worker behind the last item": (
        "our planner in the kernel, 2026-11-22, found by this emulator",
        "A read behind the end of q_begin: harmless where zeros lie there, else a fault of the "
        "card. The worker behind the last request looked for the next one that has rows.",
        "The search ends at the last request (commit 2d4cd48).",
    ),
    "0 x NaN": (
        "ours from the first day, and public: pages hold what an earlier request left",
        "A whole row is NaN. Tokens behind kv_len have weight 0, but their V is multiplied too, "
        "and 0 x NaN is NaN in a tensor core.",
        "Zeros over V behind the last token. No check sees it: each access is in order and in "
        "bounds, and the arithmetic is as asked. A test with poisoned pages does.",
    ),
    "P that is never exactly 1": (
        "our keep_ab, 2026-11-20",
        "No wrong result, but a larger error. Where the row max, in log2 units, is rounded up to "
        "an integer, the greatest weight lies anywhere in (1/2, 1] and is rounded to bf16, even "
        "that of a single key.",
        "The first row max is the score itself (commit b4cdbfb). No check sees a rounding; a "
        "bound on the error of few keys does.",
    ),
    "a stale plan": (
        "public and ours: a plan written over while a captured call reads it",
        "A block of tokens is ignored. Half of the workers read the plan of this step, half that "
        "of the step before; between their pieces lies a block that is in no worker's range.",
        "A plan is bound to its call, or made in the kernel. No check sees it: the kernel does "
        "what the plan says. The oracle does.",
    ),
    "registers that are not there": (
        "our keep_ab, an attempt of 2026-11-20",
        "A hang at the first setmaxnreg, on a card alone. The roles request more registers than a "
        "CTA had at its launch, and the warp that requests more waits for ever.",
        "A budget on paper. The emulator counts no registers: it gives each thread all that the "
        "PTX names.",
    ),
}
