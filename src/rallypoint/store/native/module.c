/* `rallypoint.store._native`: the store in C as a Python type, with the interpreter's lock released while it works.
 *
 * Only the stable interface of Python 3.11 is used, so that one file serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#ifndef SOURCES
#define SOURCES ""
#endif

typedef struct {
    PyObject_HEAD
    Store store;
    PyObject *refused, *starved;
    PyThreadState *thread; /* of whoever is in `ready`, while the lock is released */
    bool open, busy;
} Sockets;

static Sockets *owner(Store *store)
{
    return (Sockets *)((char *)store - offsetof(Sockets, store));
}

/* Calls Python from `ready`. What goes wrong there must not stop the store. */
static void tell(PyObject *callback, PyObject *arguments)
{
    PyObject *result = arguments ? PyObject_CallObject(callback, arguments) : NULL;
    if (result == NULL)
        PyErr_WriteUnraisable(callback);
    Py_XDECREF(result);
    Py_XDECREF(arguments);
}

static void on_refused(Store *store, Conn *conn, const Refusal *refusal)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    tell(self->refused,
         Py_BuildValue("(iiKy#y#)", conn->fd, (int)refusal->reason, (unsigned long long)refusal->number,
                       refusal->first.bytes ? (const char *)refusal->first.bytes : "", (Py_ssize_t)refusal->first.size,
                       refusal->second.bytes ? (const char *)refusal->second.bytes : "",
                       (Py_ssize_t)refusal->second.size));
    self->thread = PyEval_SaveThread();
}

static void on_starved(Store *store, int error)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    tell(self->starved, Py_BuildValue("(i)", error));
    self->thread = PyEval_SaveThread();
}

static bool usable(Sockets *self)
{
    if (self->open && !self->busy)
        return true;
    const char *why = self->open ? "the store is at work: one thread may use it, and no callback" : "the store is closed";
    PyErr_SetString(PyExc_RuntimeError, why);
    return false;
}

static PyObject *sockets_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"listener", "refused", "starved", NULL};
    int listener;
    PyObject *refused, *starved;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iOO", names, &listener, &refused, &starved))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sockets *self = (Sockets *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    if (store_open(&self->store, listener) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->open = true;
    self->store.refused = on_refused;
    self->store.starved = on_starved;
    self->refused = Py_NewRef(refused);
    self->starved = Py_NewRef(starved);
    return (PyObject *)self;
}

static int sockets_clear(Sockets *self)
{
    Py_CLEAR(self->refused);
    Py_CLEAR(self->starved);
    return 0;
}

static int sockets_traverse(Sockets *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->refused);
    Py_VISIT(self->starved);
    return 0;
}

static void end(Sockets *self)
{
    if (self->open) {
        self->open = false;
        store_close(&self->store);
    }
    sockets_clear(self);
}

static void sockets_dealloc(Sockets *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    end(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *sockets_fileno(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    return usable(self) ? PyLong_FromLong(self->store.epoll) : NULL;
}

static PyObject *sockets_ready(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (!usable(self))
        return NULL;
    self->busy = true;
    self->thread = PyEval_SaveThread();
    for (int sweeps = 0; sweeps < MOST_SWEEPS && sweep(&self->store) > 0; sweeps++)
        ;
    PyEval_RestoreThread(self->thread);
    self->thread = NULL;
    self->busy = false;
    Py_RETURN_NONE;
}

static PyObject *failure(int error)
{
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *sockets_accept_again(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (!usable(self))
        return NULL;
    if (accept_again(&self->store) < 0)
        return failure(errno);
    Py_RETURN_NONE;
}

static PyObject *sockets_adopt(Sockets *self, PyObject *descriptor)
{
    long fd = PyLong_AsLong(descriptor);
    if ((fd == -1 && PyErr_Occurred()) || !usable(self))
        return NULL;
    int error = conn_adopt(&self->store, (int)fd);
    if (error)
        return failure(error);
    Py_RETURN_NONE;
}

static PyObject *sockets_connections(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromSize_t(self->open ? self->store.conn_count : 0);
}

static PyObject *sockets_close(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (self->busy && !usable(self))
        return NULL;
    end(self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fileno", (PyCFunction)sockets_fileno, METH_NOARGS, "A descriptor that is readable while there is work."},
    {"ready", (PyCFunction)sockets_ready, METH_NOARGS, "Do what there is to do."},
    {"accept_again", (PyCFunction)sockets_accept_again, METH_NOARGS, "Look at the listening socket again."},
    {"adopt", (PyCFunction)sockets_adopt, METH_O, "Serve a connected, non-blocking socket, and own its descriptor."},
    {"connections", (PyCFunction)sockets_connections, METH_NOARGS, "How many clients are connected."},
    {"close", (PyCFunction)sockets_close, METH_NOARGS, "End all connections; the listening socket is not closed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A worker store's connections and all that it holds."},
    {Py_tp_new, sockets_new},
    {Py_tp_dealloc, sockets_dealloc},
    {Py_tp_traverse, sockets_traverse},
    {Py_tp_clear, sockets_clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "rallypoint.store._native.Sockets",
    .basicsize = sizeof(Sockets),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

static int begin(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Sockets", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return PyModule_AddStringConstant(module, "SOURCES", SOURCES);
}

static PyModuleDef_Slot steps[] = {{Py_mod_exec, begin}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "The worker store in C.", .m_size = 0, .m_slots = steps,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
