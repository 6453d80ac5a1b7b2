import os

import torch_npu
from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension
from torch_npu.utils.cpp_extension import NpuExtension

PYTORCH_NPU_INSTALL_PATH = os.path.dirname(os.path.abspath(torch_npu.__file__))

extension = NpuExtension(
    name="scaled_ops_lib",
    sources=["./csrc/ops.cpp"],
    extra_compile_args=[
        "-O0",
        "-I" + os.path.join(PYTORCH_NPU_INSTALL_PATH, "include/third_party/acl/inc"),
    ],
)

setup(
    name="scaled_ops",
    version="1.0",
    ext_modules=[extension],
    packages=find_packages(),
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
