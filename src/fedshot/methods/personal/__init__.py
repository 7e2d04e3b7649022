"""pFedFSL and the personalised methods that it is compared with."""
