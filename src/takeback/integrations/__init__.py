"""takeback inside of training frameworks: each module here needs the package that it is named after."""
