"""Downloads and files of data sets."""
