"""The exceptions of `kt_kernel.sft`, under the names that programs written for kt-kernel catch.

They are errors of ktransformers too (`ktransformers.ground.errors`), so a message says what was given, what was
expected and what to do, and `kt` prints it without a traceback."""

from __future__ import annotations

from ktransformers.ground.errors import InputError, KTError


class KTAMXError(KTError):
    """Base class of errors of expert training."""


class KTAMXNotAvailableError(KTAMXError, InputError, RuntimeError):
    """Something of kt-kernel that does not exist here; the message names what to use instead."""


class KTAMXModelNotSupportedError(KTAMXError, InputError):
    """A model whose experts cannot be computed."""


class KTAMXConfigError(KTAMXError, InputError):
    """A field of `KTConfig`, or a combination of fields, that cannot be used."""


class KTActivationPolicyError(KTAMXConfigError, NotImplementedError):
    """The one combination of activation policies that means nothing; kt-kernel raises a NotImplementedError."""


class KTArtifactError(InputError, RuntimeError):
    """Files of an adapter that are missing, damaged, or of another model."""
