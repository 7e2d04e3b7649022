"""pFedFSL and the personalised methods it is compared with."""
