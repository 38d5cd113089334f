"""The rivals that benchmarks measure beside ours: stores, codecs, and lossy methods. Each needs its own library."""
