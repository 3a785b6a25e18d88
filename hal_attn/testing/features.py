"""The columns of the support matrix and the rules behind them, by short names."""

from __future__ import annotations

from types import MappingProxyType

FEATURES: tuple[str, ...] = (
    "dtype float32",
    "dtype float64",
    "dtype bfloat16",
    "dtype float16",
    "batched",
    "packed",
    "head dims",
    "value head dim",
    "grouped heads",
    "scale",
    "causal",
    "causal, unequal lengths",
    "window",
    "bool mask",
    "float mask",
    "key padding mask",
    "softcap",
    "sinks",
    "ALiBi",
    "dropout",
    "LSE",
    "gradient",
    "gradient of LSE",
    "gradient of options",
    "deterministic",
    "ring merge",
    "lengths",
    "empty sequences",
    "strides",
    "large values",
    "neighbours",
    "hidden values",
    "metadata",
    "no waiting",
    "contract",
)

RULES: MappingProxyType[str, str] = MappingProxyType(
    {
        "scale": "scores are scale * q.k; None is 1/sqrt(D) of the caller's head dim, and 0.0 is a value",
        "softcap": "softcap c makes scores c * tanh(s / c), after the scale and before the bias",
        "bias": "a float mask and ALiBi, -slope * |i + Sk - Sq - j|, are added to the capped scores",
        "sinks": "a sink is one more logit a head in the denominator, without a value",
        "dropout": "dropout_p is the probability of dropping a weight; what is kept grows by 1 / (1 - dropout_p)",
        "visible keys": "causal and windows hang from the bottom right: place i + Sk - Sq, edges inclusive",
        "masks": "a bool mask is True where a query may attend; -inf in a float mask hides",
        "heads": "query head h reads key head h // (H // Hkv); value may have a head dim of its own",
        "LSE": "the LSE is float32, in natural log, of all that is in the denominator: [B, H, Sq], packed [H, Tq]",
        "blind rows": "a query that sees no key has output 0, LSE -inf (or the sink) and gradient 0",
        "packed": "sequences of a packed call are told apart by their offsets and never see each other",
        "hidden values": "what a query may not see does not reach its output",
        "merging": "results over parts of the keys merge to the result over all of them, however the keys are cut",
        "gradients": "query, key and value get the gradients of the same formula, options where claimed",
        "precision": "the error is at most twice that of plain PyTorch in the same dtype, plus one unit in the last"
        " place",
        "determinism": "deterministic=True gives the same bits on repeat",
        "arguments": "every argument given has its effect, and inputs stay as they are",
        "layouts": "any strides, offsets and shared memory of the inputs give the same values",
        "metadata": "what is prepared for a batch serves every layer, and only the calls that it was made for",
        "no waiting": "with lengths known on the host a call never waits for the device",
        "refused by name": "what is not claimed is refused, and the refusal names the argument",
        "claims": "what is claimed is taken and computed, and something is claimed",
        "contract": "hooks return what the contract says: shapes, dtypes, devices, and no other exception",
    }
)
