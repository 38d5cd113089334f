"""The remote tier: records that machines share, in servers that others wrote.

`engine` says what is asked of a server; `opening` makes an engine of a URL, and `engines` has one folder or file for
each kind. An engine moves bytes under keys and knows nothing of records: whoever reads checks what it got.
"""
