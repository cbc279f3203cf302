"""Object stores, such as s3://bucket/run: what is written to one is complete or absent.

fsspec has the file systems. Importing this package loads no TensorFlow, and fsspec only
when an address is used.
"""
