/** Starts drills, which are faults that a person injects, and shows the outcome of each drill. */
import { Button, NativeSelect } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { Link } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { call } from '../api/client'
import { drillsQuery, fleetsQuery, jobQuery, jobsQuery, useRole } from '../api/queries'
import type { Drill } from '../contract'
import { drillable, drillStatus, drillsVerdict, type Fault } from '../model/drills'
import { sentence } from '../model/format'
import { Ago, Empty, JobLink, NodeLink, Shown, Status, ToneIcon } from '../parts/Basics'
import { Card } from '../parts/Card'
import { ConfirmByName } from '../parts/ConfirmByName'
import { PageHead } from '../parts/PageHead'
import { useAddress } from '../parts/address'
import { DRILLS } from '../words/drills'

const MOST = 200

export default function DrillsPage() {
  useDocumentTitle('Drills, Everstep')
  const drills = useQuery(drillsQuery)
  const fleets = useQuery(fleetsQuery)
  const allowed = (fleets.data ?? []).filter((fleet) => fleet.AllowDrills).map((fleet) => fleet.FleetName)
  const verdict = drills.data && fleets.data ? drillsVerdict(drills.data, allowed) : undefined
  const words = DRILLS.history
  return (
    <div className="stack">
      <PageHead title={DRILLS.title} verdict={verdict} />
      <Shown query={fleets} rows={2}>
        {(all) => <Start allowed={allowed} firstFleet={all[0]?.FleetName ?? 'main'} />}
      </Shown>
      <Card title={words.title} isFlush>
        <Shown query={drills}>
          {(list) => (list.length ? <History drills={list} /> : <p className="dim empty">{words.none}</p>)}
        </Shown>
      </Card>
    </div>
  )
}

function Start({ allowed, firstFleet }: { allowed: string[]; firstFleet: string }) {
  const { isAdmin } = useRole()
  if (!isAdmin) return <p className="dim">{DRILLS.viewer}</p>
  if (allowed.length) return <DrillForm allowed={allowed} />
  return (
    <Empty title={DRILLS.forbidden.title} command={`everstep fleets update ${firstFleet} --allow-drills`}>
      {DRILLS.forbidden.text}
    </Empty>
  )
}

/** The form that starts a drill. The URL contains its job, fault and node, so the form keeps them after a start. */
function DrillForm({ allowed }: { allowed: string[] }) {
  const client = useQueryClient()
  const [search, set] = useAddress()
  const [isAsking, setAsking] = useState(false)
  const [started, setStarted] = useState('')
  const addressOf = useJobAddresses()
  const all = useQuery(jobsQuery).data ?? []
  const able = drillable(all, allowed)
  const chosen = all.find((job) => job.RunId === search.get('job')) ?? able[0]
  const address = chosen && addressOf(chosen)
  const job = useQuery({ ...jobQuery(address ?? ''), enabled: address !== undefined }).data
  const words = DRILLS.form
  if (chosen === undefined || address === undefined) {
    return (
      <Empty title={DRILLS.noJob.title} command="everstep jobs list">
        {DRILLS.noJob.text(allowed)}
      </Empty>
    )
  }
  const isAble = able.includes(chosen)
  const choices = isAble ? able : [chosen, ...able]
  const faults = Object.entries(DRILLS.faults)
  const type = (faults.find(([name]) => name === search.get('fault'))?.[0] ?? 'terminate-instance') as Fault
  const fault = DRILLS.faults[type]
  const nodes = job?.NodeIds ?? []
  const node = nodes.find((id) => id === search.get('node')) ?? ''
  return (
    <Card title={words.title}>
      <div className="row fields">
        <NativeSelect
          label={words.job}
          value={chosen.RunId}
          data={choices.map((each) => ({ value: each.RunId, label: each.TrainingJobName }))}
          onChange={(event) => set({ job: event.currentTarget.value, node: '' })}
        />
        <NativeSelect
          label={words.fault}
          value={type}
          data={faults.map(([value, { label }]) => ({ value, label }))}
          onChange={(event) => set({ fault: event.currentTarget.value })}
        />
        <NativeSelect
          label={words.node}
          value={node}
          data={[{ value: '', label: words.lastNode }, ...nodes]}
          onChange={(event) => set({ node: event.currentTarget.value })}
        />
        <Button color="red" variant="outline" disabled={!isAble} onClick={() => setAsking(true)}>
          {words.start}
        </Button>
      </div>
      <p className="dim">{isAble ? fault.effect : DRILLS.noJob.text(allowed)}</p>
      {started && (
        <p className="banner tone-busy" role="status">
          <ToneIcon tone="busy" /> {words.started(started)}
        </p>
      )}
      <ConfirmByName
        name={chosen.TrainingJobName}
        verb={words.verb}
        opened={isAsking}
        onClose={() => setAsking(false)}
        onConfirm={async () => {
          const target = node ? { NodeId: node } : {}
          await call('StartDrill', { TrainingJobName: chosen.RunId, DrillType: type, ...target })
          set({ job: chosen.RunId, fault: type })
          setStarted(chosen.TrainingJobName)
          void client.invalidateQueries()
        }}
      >
        <p>
          {words.effect(fault.label, node || words.lastNode)} {fault.effect}
        </p>
        <p>{words.warning}</p>
      </ConfirmByName>
    </Card>
  )
}

function History({ drills }: { drills: Drill[] }) {
  const { columns, incident, rank } = DRILLS.history
  const faultOf = (drill: Drill) => {
    const label = DRILLS.faults[drill.DrillType]?.label ?? drill.DrillType
    return drill.Rank === undefined ? label : rank(label, drill.Rank)
  }
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label={DRILLS.history.title}>
      <table className="grid stacked">
        <thead>
          <tr>
            {Object.values(columns).map((label) => (
              <th key={label}>{label}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {drills
            .toReversed()
            .slice(0, MOST)
            .map((drill) => (
              <tr key={drill.DrillId}>
                <td className="moment" data-name={columns.requested}>
                  <Ago at={drill.CreationTime} />
                </td>
                <td data-name={columns.status}>
                  <Status {...drillStatus(drill.DrillStatus)} />
                </td>
                <td className="name" data-name={columns.job}>
                  <JobLink name={drill.TrainingJobName} />
                </td>
                <td className="nowrap" data-name={columns.fault}>
                  {faultOf(drill)}
                </td>
                <td className="nowrap" data-name={columns.node}>
                  <NodeLink id={drill.NodeId} fleet={drill.FleetName} />
                </td>
                <td className="nowrap" data-name={columns.by}>
                  {drill.RequestedBy}
                </td>
                <td className="reason">
                  {sentence(drill.Outcome ?? '')}{' '}
                  {drill.IncidentId && (
                    <Link to={`/incidents/${encodeURIComponent(drill.IncidentId)}`}>{incident}</Link>
                  )}
                </td>
              </tr>
            ))}
        </tbody>
      </table>
    </div>
  )
}
