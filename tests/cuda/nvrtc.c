/* NVRTC, which compiles kernels at run time: as they are not run, it gives eight bytes for each. */
#include <stddef.h>
#include <string.h>
const char *nvrtcGetErrorString(int e) { return "error"; }
int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
int nvrtcCreateProgram(void **p, const char *s, const char *n, int k, const char *const *h, const char *const *i) { *p = &*p; return 0; }
int nvrtcCompileProgram(void *p, int n, const char *const *o) { return 0; }
int nvrtcDestroyProgram(void **p) { return 0; }
int nvrtcAddNameExpression(void *p, const char *n) { return 0; }
int nvrtcGetLoweredName(void *p, const char *n, const char **out) { *out = n; return 0; }
int nvrtcGetCUBINSize(void *p, size_t *n) { *n = 8; return 0; }
int nvrtcGetCUBIN(void *p, char *code) { memset(code, 0, 8); return 0; }
int nvrtcGetPTXSize(void *p, size_t *n) { *n = 8; return 0; }
int nvrtcGetPTX(void *p, char *code) { memset(code, 0, 8); return 0; }
int nvrtcGetProgramLogSize(void *p, size_t *n) { *n = 1; return 0; }
int nvrtcGetProgramLog(void *p, char *log) { *log = 0; return 0; }
