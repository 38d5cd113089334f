// Ends what intrinsics_begin.h began.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
