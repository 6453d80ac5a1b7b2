// The network is in libtorch_aie; this library only has the name that projects link.
extern "C" int torchgraft_ascendie() { return 0; }
