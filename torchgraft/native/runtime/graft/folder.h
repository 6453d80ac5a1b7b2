// A folder of our own for as long as the object lives.
#pragma once
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>

#include <string>

#include "torchgraft/torchgraft.h"

namespace torchgraft {

struct Folder {
  Folder() {
    const char* base = getenv("TMPDIR");
    path = std::string(base ? base : "/tmp") + "/torchgraft-XXXXXX";
    if (!mkdtemp(path.data())) throw Error("no folder can be made in " + path + "; set TMPDIR");
  }
  // Not std::filesystem::remove_all: libtorch.so of torch 2.11 exports a broken one.
  ~Folder() {
    nftw(
        path.c_str(),
        [](const char* file, const struct stat*, int, struct FTW*) {
          remove(file);
          return 0;  // what is left is left
        },
        16, FTW_DEPTH | FTW_PHYS);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path;
};

}  // namespace torchgraft
