"""Reading files safely: archives, images, size limits, hashes, and the caches on disk."""
