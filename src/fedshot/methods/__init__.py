"""The methods, by the names they have in configurations and tables."""

from typing import Any

from fedshot.methods.fedfsl_naive import FedFSLNaive
from fedshot.methods.fl_proto import FLProto
from fedshot.methods.fsl_local import FSLLocal

METHODS: dict[str, type[Any]] = {method.name: method for method in (FedFSLNaive, FLProto, FSLLocal)}

__all__ = ["METHODS", "FLProto", "FSLLocal", "FedFSLNaive"]
