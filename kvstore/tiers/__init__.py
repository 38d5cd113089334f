"""The tiers a block lives in: device, host, disk. They hold records by id; they know codecs, never the store."""
