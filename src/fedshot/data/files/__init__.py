"""Files from elsewhere: archives, images, hashes, and bounds on what is read."""
