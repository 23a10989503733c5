package lab

type gateway struct{ done chan struct{} }
