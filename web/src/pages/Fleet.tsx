/** One fleet: its state, what needs attention, its settings, its nodes and its events. */
import '@mantine/core/styles/NumberInput.css'
import { Button, NumberInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { Link, useParams } from 'react-router'

import { call } from '../api/client'
import { eventsQuery, fleetsQuery, nodesQuery, useRole } from '../api/queries'
import type { Fleet } from '../contract'
import { fleetFigures, hook, shown, type FleetFigures } from '../model/figures'
import { changesOf, fleetVerdict, formOf, spares } from '../model/fleets'
import { count, dollars, plural, sentence } from '../model/format'
import { exposures, nodeNotices, noticesIn } from '../model/nodes'
import { Ago, Empty, FactList, Form, NodeLink, Problem, Shown, Status, useIsStale, type Fact } from '../parts/Basics'
import { Card } from '../parts/Card'
import { ConfirmButton } from '../parts/ConfirmButton'
import { FleetNodes } from '../parts/FleetNodes'
import { PageHead } from '../parts/PageHead'
import { FLEET, FLEETS } from '../words/fleets'
import { EventList } from './JobTabs'

export default function FleetPage() {
  const { name = '' } = useParams()
  useDocumentTitle(FLEETS.document(name))
  const query = useQuery(fleetsQuery)
  return (
    <Shown query={query} rows={12}>
      {(fleets) => {
        const fleet = fleets.find((each) => each.FleetName === name)
        return fleet ? <FleetView fleet={fleet} /> : <NotFound name={name} />
      }}
    </Shown>
  )
}

const crumbs = <Link to="/fleets">{FLEETS.title}</Link>

function NotFound({ name }: { name: string }) {
  const words = FLEET.notFound(name)
  return (
    <div className="stack">
      <PageHead crumbs={crumbs} title={words.title} />
      <Empty title={words.text} command="everstep fleets list" />
    </div>
  )
}

function FleetView({ fleet }: { fleet: Fleet }) {
  const { isAdmin } = useRole()
  const figures = fleetFigures(fleet, { isStale: useIsStale() })
  const badge = (
    <span {...hook(figures, 'status')}>
      <Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} />
    </span>
  )
  const canUnfreeze = isAdmin && fleet.FleetStatus === 'frozen'
  return (
    <div className="stack">
      <PageHead
        crumbs={crumbs}
        title={fleet.FleetName}
        status={badge}
        actions={canUnfreeze && <Unfreeze fleet={fleet} />}
        verdict={fleetVerdict(fleet)}
      />
      {fleet.Reason && <p className="dim">{sentence(fleet.Reason)}</p>}
      {(fleet.Drift ?? []).length > 0 && <Drift differences={fleet.Drift} />}
      <Attention fleet={fleet} />
      <Card title={FLEET.facts}>
        <FactList facts={factsOf(fleet, figures)} />
        {isAdmin && fleet.FleetStatus !== 'deleting' && <Change key={JSON.stringify(formOf(fleet))} fleet={fleet} />}
      </Card>
      <FleetNodes fleet={fleet} />
      <div>
        <h2>{FLEET.events}</h2>
        <EventList scope={{ fleet: fleet.FleetName }} most={40} />
      </div>
    </div>
  )
}

function Drift({ differences }: { differences: readonly string[] }) {
  return (
    <section className="card problem tone-warn" role="status">
      <h2>{FLEET.drift.title}</h2>
      <p>{FLEET.drift.text}</p>
      <ul>
        {differences.map((each) => (
          <li key={each}>{each}</li>
        ))}
      </ul>
    </section>
  )
}

function factsOf(fleet: Fleet, figures: FleetFigures): Fact[] {
  const labels = FLEET.labels
  const figure = (field: Parameters<typeof shown<FleetFigures>>[1]) => shown(figures, field)
  const ofDesired = FLEET.ofDesired(figure('nodes'), figure('desiredNodes'), count(fleet.MaxNodeCount))
  const price =
    fleet.PriceUsdPerHour === undefined
      ? FLEETS.unknown
      : FLEET.prices(dollars(fleet.PriceUsdPerHour), figure('priceUsdPerHour'))
  const cost = figures.costUsd === undefined ? FLEETS.unknown : figure('costUsd')
  const drills = fleet.AllowDrills ? (
    <Link key="drills" to="/drills">
      {FLEET.allowed}
    </Link>
  ) : (
    FLEET.notAllowed
  )
  return [
    [labels.nodes, ofDesired, hook(figures, 'nodes')],
    [labels.connected, figure('connectedNodes'), hook(figures, 'connectedNodes')],
    [labels.spares, spares(fleet)],
    [labels.least, count(fleet.MinNodeCount)],
    [labels.group, <code key="group">{fleet.AutoScalingGroupName}</code>],
    [labels.instances, FLEET.zone(fleet.InstanceType ?? '', fleet.AvailabilityZone ?? '')],
    ...imageFacts(fleet),
    [labels.price, price, hook(figures, 'priceUsdPerHour')],
    [labels.cost, cost, hook(figures, 'costUsd')],
    [labels.ettr, figure('ettrRatio'), hook(figures, 'ettrRatio')],
    [labels.mttr, figure('mttrSeconds'), hook(figures, 'mttrSeconds')],
    [labels.incidents, figure('incidents'), hook(figures, 'incidents')],
    [labels.lost, figure('lostNodes'), hook(figures, 'lostNodes')],
    [labels.failed, fleet.HoldFailedInstances ? FLEET.keptForInspection : FLEET.ended],
    [labels.drills, drills],
    [labels.encryption, FLEET.encryption(fleet.ReplicaEncryption, fleet.EncryptsReplicas)],
    ...rollFacts(fleet),
    [labels.created, <Ago key="created" at={fleet.CreationTime} />],
  ]
}

function imageFacts({ OldestImageTime: at }: Fleet): Fact[] {
  return at === undefined ? [] : [[FLEET.labels.oldestImage, <Ago key="image" at={at} />]]
}

/** The newest roll (replacement or reboot of all nodes): its status, its progress, and what it does or waits for. */
function rollFacts({ Roll: roll }: Fleet): Fact[] {
  if (!roll) return []
  const text = FLEET.roll(roll.RollStatus, roll.FinishedNodeCount, roll.NodeCount, roll.StatusReason)
  return [[FLEET.labels.roll, text]]
}

/**
 * Lets an administrator confirm that silent nodes have failed.
 *
 * The confirmation ends the instances of these nodes, so the administrator must type the fleet's name.
 */
function Unfreeze({ fleet: { FleetName } }: { fleet: Fleet }) {
  const words = FLEET.unfreeze
  return (
    <ConfirmButton name={FleetName} verb={words.verb} onConfirm={() => call('UnfreezeFleet', { FleetName })}>
      <p>{words.cause}</p>
      <p>{words.limit}</p>
    </ConfirmButton>
  )
}

const MOST_NAMED = 4

/** Held nodes, pending requests, files that jobs can read, and notices of AWS. */
function Attention({ fleet }: { fleet: Fleet }) {
  const nodes = useQuery(nodesQuery(fleet.FleetName)).data ?? []
  const events = useQuery(eventsQuery({ fleet: fleet.FleetName })).data?.events ?? []
  const held = nodeNotices(nodes)
  const notices = noticesIn(events)
  const exposed = exposures(nodes)
  if (!held.length && !notices.length && !exposed.length) return null
  const rows = [
    ...held.map(({ nodeId, title, text }) => ({ key: nodeId, ids: [nodeId], title: `${title}.`, text })),
    ...exposed.map(({ text, nodeIds: ids }) => ({ key: text, ids, title: FLEET.attention.exposed, text })),
    ...notices.map(({ EventId: key, NodeId, Message, Time: at }) => ({
      key,
      ids: NodeId ? [NodeId] : [],
      text: sentence(Message),
      at,
    })),
  ]
  return (
    <Card title={FLEET.attention.title}>
      <ul className="rows attention">
        {rows.map(({ key, ids, text, ...more }) => (
          <li key={key}>
            {ids.length <= MOST_NAMED ? (
              ids.map((id) => <NodeLink key={id} id={id} fleet={fleet.FleetName} />)
            ) : (
              <span>{plural(ids.length, 'node')}</span>
            )}
            {'title' in more ? (
              <span className="grow">
                <strong>{more.title}</strong> <span className="dim">{text}</span>
              </span>
            ) : (
              <>
                <span className="grow">{text}</span>
                <span className="when">
                  <Ago at={more.at} />
                </span>
              </>
            )}
          </li>
        ))}
      </ul>
    </Card>
  )
}

function Change({ fleet }: { fleet: Fleet }) {
  const client = useQueryClient()
  const [form, setForm] = useState(formOf(fleet))
  const changes = changesOf(fleet, form)
  const request = useMutation({
    mutationFn: () => call('UpdateFleet', { FleetName: fleet.FleetName, ...changes }),
    onSuccess: () => client.invalidateQueries(),
  })
  const isCounted = fleet.SparePolicy === undefined
  const isMissing = form.least === '' || (isCounted && form.spares === '')
  const field = (name: keyof typeof form, width: number) => (
    <NumberInput
      label={FLEET.labels[name]}
      size="xs"
      w={width}
      min={0}
      allowDecimal={false}
      value={form[name]}
      onChange={(value) => setForm({ ...form, [name]: value })}
    />
  )
  return (
    <Form className="row fields" onSubmit={() => request.mutate()}>
      {field('spares', 110)}
      {field('least', 150)}
      <Button type="submit" size="xs" disabled={isMissing || !Object.keys(changes).length}>
        {FLEET.change.button}
      </Button>
      {!isCounted && <span className="dim">{FLEET.change.policy(spares(fleet))}</span>}
      {request.error && <Problem error={request.error} title={FLEET.change.failed} />}
    </Form>
  )
}
