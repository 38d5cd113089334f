"""Several processes that write one store: one of them owns it, the others hand it what they put.

`store` is what programs use. `calls` are the calls that change a store, made by the owner for itself and for others;
`wire` and `shipment` bring them there, messages over a socket and tensors in sealed memory; `owner` and `link` are the
two ends.
"""
