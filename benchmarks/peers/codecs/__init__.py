"""Lossless codecs of others behind one interface (`base`); a file for each library."""
