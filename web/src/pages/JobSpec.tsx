/** The Spec tab of a job: its request as YAML, command line, Python and curl, and the changes of its revisions. */
import { NativeSelect, SegmentedControl } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'

import { useJobAddress } from '../api/addresses'
import { revisionsQuery } from '../api/queries'
import type { TrainingJob, TrainingJobRevision } from '../contract'
import { plural } from '../model/format'
import { difference } from '../model/revisions'
import { asCommand, asCurl, asPython, asYaml, requestOf } from '../model/spec'
import { Ago, Command, Shown } from '../parts/Basics'
import { Card } from '../parts/Card'
import { useAddress } from '../parts/address'
import { SPEC } from '../words/jobTabs'

const FORMS = { YAML: asYaml, CLI: asCommand, Python: asPython, curl: asCurl }

export default function SpecTab({ job }: { job: TrainingJob }) {
  const [form, setForm] = useState<keyof typeof FORMS>('YAML')
  const revisions = useQuery(revisionsQuery(useJobAddress(job), job.Revision))
  return (
    <div className="stack">
      <section className="card stack">
        <SegmentedControl
          value={form}
          onChange={(value) => setForm(value as keyof typeof FORMS)}
          data={Object.keys(FORMS)}
          aria-label={SPEC.form}
        />
        <Command text={FORMS[form](requestOf(job))} />
        <p className="dim">
          {SPEC.note(job.Revision)} <code>{job.Source?.SourceId?.slice(0, 12)}…</code>.
        </p>
      </section>
      <Card title={SPEC.revisions}>
        <Shown query={revisions} rows={2}>
          {(all) =>
            all.length > 1 ? (
              <Revisions job={job} all={all} />
            ) : (
              <p className="dim">
                {SPEC.one} <code>everstep jobs update {job.TrainingJobName}</code>.
              </p>
            )
          }
        </Shown>
      </Card>
    </div>
  )
}

function Revisions({ job, all }: { job: TrainingJob; all: TrainingJobRevision[] }) {
  const [search, , field] = useAddress()
  const newest = all.at(-1)!.Revision
  const chosen = (key: string, otherwise: number) =>
    all.find((each) => String(each.Revision) === search.get(key))?.Revision ?? otherwise
  const to = chosen('to', newest)
  const from = Math.min(chosen('from', to - 1), to)
  const changes = difference(all, from, to)
  const choices = all.map((each) => ({ value: String(each.Revision), label: SPEC.revision(each.Revision) }))
  const last = all.find((each) => each.Revision === to)
  const planned = job.ObservedRevision
  return (
    <div className="stack">
      <div className="row">
        <NativeSelect aria-label={SPEC.from} data={choices} {...field('from')} value={from} />
        <span>→</span>
        <NativeSelect aria-label={SPEC.to} data={choices} {...field('to')} value={to} />
        <span className="dim">
          {SPEC.differ(plural(changes.length, 'field'), changes.length === 1)} {SPEC.made(to)} <Ago at={last?.Time} />.
          {planned !== undefined && planned < newest ? ` ${SPEC.planned(planned)}` : ''}
        </span>
      </div>
      {changes.length > 0 && (
        <div className="diff mono" role="region" aria-label={SPEC.region(from, to)} tabIndex={0}>
          {changes.map((each) => (
            <div key={each.field}>
              {each.before !== undefined && <div className="before">{`− ${each.field}: ${each.before}`}</div>}
              {each.after !== undefined && <div className="after">{`+ ${each.field}: ${each.after}`}</div>}
              {each.applies === 'NextGeneration' && <div className="dim">{SPEC.nextLaunch}</div>}
            </div>
          ))}
        </div>
      )}
    </div>
  )
}
