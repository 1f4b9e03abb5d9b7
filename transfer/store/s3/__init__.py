"""Stores in S3 and servers that speak it: `s3://bucket/prefix`. Needs the extra `s3`.

`store` has the store, `client` the one aiobotocore client behind it, `errors` what servers refuse.
Ranged reads go through `reader` (retries, resumption, concurrency) over one of two transports:
`receive` takes the body straight into the caller's memory by `http`, `portable` goes through
aiobotocore's body. What both must check of an answer is in `ranges`.
"""
