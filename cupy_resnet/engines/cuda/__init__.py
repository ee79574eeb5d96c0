"""The parts of the CUDA engine, one per kind of operation; `engines.cuda_engine` puts them together."""
