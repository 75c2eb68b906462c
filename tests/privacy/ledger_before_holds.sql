-- A ledger that jaxdp 0.1.0 wrote before accounts and holds came; tests/privacy/test_accounts.py says what is in it.
BEGIN TRANSACTION;
CREATE TABLE datasets (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    adjacency TEXT NOT NULL,
    unit TEXT NOT NULL,
    epsilon REAL,
    delta REAL,
    accounting TEXT NOT NULL,
    renyi_order REAL,
    allow_unproven INTEGER NOT NULL,
    created_at TEXT NOT NULL
);
INSERT INTO "datasets" VALUES(1,'train','add_remove','patient',8.0,1.0e-05,'pld',NULL,0,'2026-11-22T13:50:36.907+00:00');
INSERT INTO "datasets" VALUES(2,'stream','add_remove','patient',2.0,1.0e-06,'renyi_filter',12.0,0,'2026-11-22T13:50:36.908+00:00');
INSERT INTO "datasets" VALUES(3,'survey','replace_one','answer',NULL,0.0,'pld',NULL,0,'2026-11-22T13:50:36.908+00:00');
CREATE TABLE events (id INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE);
INSERT INTO "events" VALUES(1,'{"event":{"noise_multiplier":1.0,"type":"Gaussian"},"sampling_probability":0.01,"type":"PoissonSampled"}');
INSERT INTO "events" VALUES(2,'{"count":500,"event":{"event":{"noise_multiplier":1.0,"type":"Gaussian"},"sampling_probability":0.01,"type":"PoissonSampled"},"type":"SelfComposed"}');
INSERT INTO "events" VALUES(3,'{"noise_multiplier":20.0,"type":"Laplace"}');
INSERT INTO "events" VALUES(4,'{"noise_multiplier":4.0,"type":"Gaussian"}');
INSERT INTO "events" VALUES(5,'{"noise_multiplier":9.0,"type":"Gaussian"}');
INSERT INTO "events" VALUES(6,'{"noise_multiplier":4.0,"type":"Laplace"}');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "meta" VALUES('created_at','2026-11-22T13:50:36.907+00:00');
INSERT INTO "meta" VALUES('created_by','jaxdp 0.1.0');
CREATE TABLE spends (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    dataset INTEGER NOT NULL REFERENCES datasets (id),
    partition TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES events (id),
    label TEXT NOT NULL,
    token TEXT,
    status TEXT NOT NULL CHECK (status IN ('reserved', 'committed', 'failed')),
    run TEXT NOT NULL,
    version TEXT NOT NULL,
    reserved_at TEXT NOT NULL,
    finished_at TEXT
);
INSERT INTO "spends" VALUES(1,1,'',1,'step 0','t0','committed','old','0.1.0','2026-11-22T13:50:36.929+00:00','2026-11-22T13:50:36.930+00:00');
INSERT INTO "spends" VALUES(2,1,'',1,'step 1','t1','committed','old','0.1.0','2026-11-22T13:50:36.930+00:00','2026-11-22T13:50:36.931+00:00');
INSERT INTO "spends" VALUES(3,1,'',1,'step 2','t2','committed','old','0.1.0','2026-11-22T13:50:36.931+00:00','2026-11-22T13:50:36.932+00:00');
INSERT INTO "spends" VALUES(4,1,'',2,'rest',NULL,'committed','old','0.1.0','2026-11-22T13:50:36.932+00:00','2026-11-22T13:50:36.934+00:00');
INSERT INTO "spends" VALUES(5,1,'north',3,'histogram',NULL,'committed','old','0.1.0','2026-11-22T13:50:36.936+00:00','2026-11-22T13:50:36.936+00:00');
INSERT INTO "spends" VALUES(6,1,'south',4,'',NULL,'committed','old','0.1.0','2026-11-22T13:50:36.937+00:00','2026-11-22T13:50:36.937+00:00');
INSERT INTO "spends" VALUES(7,2,'',5,'both','b','failed','old','0.1.0','2026-11-22T13:50:36.938+00:00','2026-11-22T13:50:36.939+00:00');
INSERT INTO "spends" VALUES(8,3,'',6,'both','b','failed','old','0.1.0','2026-11-22T13:50:36.938+00:00','2026-11-22T13:50:36.939+00:00');
CREATE TABLE totals (
    dataset INTEGER NOT NULL REFERENCES datasets (id),
    partition TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES events (id),
    spends INTEGER NOT NULL,
    first_at TEXT NOT NULL,
    last_at TEXT NOT NULL,
    first_label TEXT NOT NULL,
    last_label TEXT NOT NULL,
    PRIMARY KEY (dataset, partition, event)
) WITHOUT ROWID;
INSERT INTO "totals" VALUES(1,'',1,3,'2026-11-22T13:50:36.929+00:00','2026-11-22T13:50:36.931+00:00','step 0','step 2');
INSERT INTO "totals" VALUES(1,'',2,1,'2026-11-22T13:50:36.932+00:00','2026-11-22T13:50:36.932+00:00','rest','rest');
INSERT INTO "totals" VALUES(1,'north',3,1,'2026-11-22T13:50:36.936+00:00','2026-11-22T13:50:36.936+00:00','histogram','histogram');
INSERT INTO "totals" VALUES(1,'south',4,1,'2026-11-22T13:50:36.937+00:00','2026-11-22T13:50:36.937+00:00','','');
INSERT INTO "totals" VALUES(2,'',5,1,'2026-11-22T13:50:36.938+00:00','2026-11-22T13:50:36.938+00:00','both','both');
INSERT INTO "totals" VALUES(3,'',6,1,'2026-11-22T13:50:36.938+00:00','2026-11-22T13:50:36.938+00:00','both','both');
CREATE UNIQUE INDEX spends_token ON spends (dataset, token) WHERE token IS NOT NULL;
CREATE INDEX spends_open ON spends (dataset) WHERE status <> 'committed';
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('spends',8);
COMMIT;
PRAGMA application_id = 1784967217;
PRAGMA user_version = 1;
