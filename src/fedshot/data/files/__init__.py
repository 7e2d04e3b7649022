"""Reading files: archives, images, hashes, the image cache, and limits on what is read."""
