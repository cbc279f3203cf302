// A number that changes with the operations and with the C functions of the library;
// also in __init__.py.
extern "C" __attribute__((visibility("default"))) int hvdtrain_interface() { return 2; }
