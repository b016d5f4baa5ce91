# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Misspelt public names. Pyright must report an error on each of these lines. The module is never imported."""

import jaxquant

jaxquant.maybe_quantise_model(None, {}, None)  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.QuantConfig(quantisation="fp8")  # pyright: ignore[reportCallIssue]
jaxquant.QuantConfig(quant_backend="nativ")  # pyright: ignore[reportArgumentType]
jaxquant.state.TrainStat.create()  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.state.splt({})  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.serving.sav("folder", {}, {})  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.optim.adamw_8bits(1e-3)  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.calibrate(None, {}, {}, [], observr="max")  # pyright: ignore[reportCallIssue]
jaxquant.coverage(abs, 1).chek()  # pyright: ignore[reportAttributeAccessIssue]
jaxquant.quantize(lambda p: p, {}).initialise()  # pyright: ignore[reportAttributeAccessIssue]
